"""Small jobs to parse and check: a model folder with a tokenizer and without weights' contents, a data file,
and the flags that name them."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megarl.config.errors import ConfigError
from megarl.config.hf_config import ModelShape
from megarl.files.tensor_header import ITEMSIZE
from megarl.reshard.atlas import hf_sizes
from megarl.reshard.hf_folder import is_sequence_classifier

# The quickstart's model: 4 attention heads, 2 key-value heads, 2 layers, 283 -> 320 words.
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 283,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "eos_token_id": 1,
}


MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
WORDS = ["<pad>", "<end>", "<user>", "<assistant>", *"0123456789+-?"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}"
)
ROW = {
    "data_source": "megarl/sums",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"ground_truth": "2"},
    "response": "2",
}


def write_tokenizer(folder):
    """One token per character."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_zeros(folder, dtype="F32", **sizes):
    """The model.safetensors that config.json asks for, all zeros: a header, and a hole in the file. `sizes`
    replaces shapes by name.

    An empty file where config.json says nothing that can be used."""
    try:
        wanted = hf_sizes(ModelShape.load(folder, value_head=is_sequence_classifier(folder)))
    except (ConfigError, ValueError, TypeError, AttributeError):
        wanted = {}
    header, at = {}, 0
    for name, (rows, cols) in (wanted | sizes).items():
        shape = [rows] if cols == 1 else [rows, cols]
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [at, at := at + rows * cols * ITEMSIZE[dtype]],
        }
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        if wanted:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)


@pytest.fixture
def write_model(tmp_path):
    """write_model({...}) -> a folder whose config.json holds these keys."""

    def write(config, generation_config=None, name="model"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        write_zeros(folder)
        write_tokenizer(folder)
        if generation_config is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation_config))
        return folder

    return write


@pytest.fixture
def job(tmp_path, write_model):
    """@args-file of a GRPO job that passes every check on two ranks; flags after it override."""
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    (tmp_path / "job.args").write_text(f"""
        --algorithm grpo --model '{write_model(QWEN3)}' --train-data '{data}' --save '{tmp_path / "run"}'
        --train-iters 3 --nproc-per-node 2 --max-prompt-length 64 --max-response-length 64""")
    return f"@{tmp_path / 'job.args'}"

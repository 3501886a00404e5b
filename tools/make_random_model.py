"""Make a model folder with the exact shape of Qwen2.5-0.5B-Instruct, without a download, to test the memory
and speed of a machine.

    python tools/make_random_model.py --out models/random-0.5b             for training with --random-init
    python tools/make_random_model.py --out models/random-0.5b --weights   with weights in bf16, N(0, 0.02)

config.json and generation_config.json are those of the real model. The tokenizer has the same number of
tokens (151,643), special tokens, splitting into words, and a similar chat template. Its merges are made up:
all pairs and many triples of printable ASCII characters. Texts therefore get other ids, and more of them."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import string
import sys
from pathlib import Path

logger = logging.getLogger("make_random_model")

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GENERATION_CONFIG = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
}
NUM_TOKENS = 151643
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # their ids follow the tokens'
CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The most frequent characters come first, because not all triples fit.
CHARACTERS = (
    " "
    + string.ascii_lowercase
    + string.digits
    + ".,?!'\"$%-+*/=#:;()"
    + string.ascii_uppercase
    + "&<>@[\\]^_`{|}~"
)


def write_model_folder(out: Path, weights: bool, seed: int) -> None:
    """Write the folder. Files of an earlier call are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", CONFIG)
    write_json(out / "generation_config.json", GENERATION_CONFIG)
    write_tokenizer(out)
    if weights:
        write_weights(out, seed)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(out: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab, merges = made_up_merges()
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 131072,
            "clean_up_tokenization_spaces": False,
        },
    )


def made_up_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return (token -> id, merges in order) of a byte-level BPE with NUM_TOKENS tokens.

    The tokens are bytes, then pairs, then triples of CHARACTERS."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = [{" ": "Ġ"}.get(c, c) for c in CHARACTERS]  # Ġ is how byte-level BPE writes a space
    merges = list(itertools.product(characters, repeat=2))
    triples = sorted(itertools.product(range(len(characters)), repeat=3), key=max)[
        : NUM_TOKENS - len(alphabet) - len(merges)
    ]
    merges += [(characters[a] + characters[b], characters[c]) for a, b, c in triples]
    tokens = alphabet + [left + right for left, right in merges]
    return {token: index for index, token in enumerate(tokens)}, merges


def write_weights(out: Path, seed: int) -> None:
    """Write model.safetensors in bf16: norms are 1, biases 0, matrices N(0, initializer_range)."""
    import torch
    from safetensors.torch import save_file

    from megarl.config.hf_config import ModelShape
    from megarl.megatron.initialize import random_weights
    from megarl.reshard.atlas import hf_atlas

    shape = ModelShape.load(out)
    atlas = hf_atlas(shape)
    tensors = {
        name: torch.empty(param.rows, param.cols, dtype=torch.bfloat16) for name, param in atlas.items()
    }
    random_weights(shape, atlas, tensors, seed, std=CONFIG["initializer_range"])
    flat = {name: tensor.flatten() if tensor.shape[1] == 1 else tensor for name, tensor in tensors.items()}
    save_file(flat, out / "model.safetensors", metadata={"format": "pt"})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write; files of an earlier call are replaced"
    )
    parser.add_argument("--weights", action="store_true", help="write model.safetensors too (988 MB)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    write_model_folder(arguments.out, arguments.weights, arguments.seed)
    logger.info("%s", arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

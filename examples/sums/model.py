"""Write the quickstart's model folder: a Qwen3 of 368,128 parameters with its own tokenizer and random initial
weights."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator

import numpy as np

from sums.problems import snap_answer, sums, worked_answer

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
PAD_ID, EOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{m.role}}|>{{m.content}}<|end|>{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}"
)
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _FFN = 128, 2, 4, 2, 32, 256


def write_model_folder(folder: str, seed: int) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and model.safetensors (fp32, from
    `seed`)."""
    from safetensors.numpy import save

    os.makedirs(folder, exist_ok=True)
    vocab_size = _write_tokenizer(folder)
    _write_json(os.path.join(folder, "config.json"), _config(vocab_size))
    _write_json(
        os.path.join(folder, "generation_config.json"), {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    )
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(save(dict(initial_weights(vocab_size, seed)), metadata={"format": "pt"}))


def initial_weights(vocab_size: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, fp32 array [out, in]) of every weight.

    The scales decide how fast so small a model learns (measured): embeddings 0.3, output layer 0.02, every
    other matrix 1/sqrt(fan_in), those that write into the residual stream divided by sqrt(2 * layers). Norms
    are 1.
    """
    # RandomState, not Generator: NumPy promises this stream never changes, so a seed means the same weights
    # everywhere.
    rng = np.random.RandomState(seed)

    def matrix(name: str, rows: int, columns: int, std: float) -> tuple[str, np.ndarray]:
        return name, (rng.standard_normal((rows, columns)) * std).astype(np.float32)

    def norm(name: str, size: int) -> tuple[str, np.ndarray]:
        return name, np.ones(size, dtype=np.float32)

    query, key_value = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    std, residual = 1 / math.sqrt(_HIDDEN), 1 / math.sqrt(2 * _LAYERS)
    yield matrix("model.embed_tokens.weight", vocab_size, _HIDDEN, 0.3)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        yield norm(prefix + "input_layernorm.weight", _HIDDEN)
        yield matrix(prefix + "self_attn.q_proj.weight", query, _HIDDEN, std)
        yield matrix(prefix + "self_attn.k_proj.weight", key_value, _HIDDEN, std)
        yield matrix(prefix + "self_attn.v_proj.weight", key_value, _HIDDEN, std)
        yield norm(prefix + "self_attn.q_norm.weight", _HEAD_DIM)
        yield norm(prefix + "self_attn.k_norm.weight", _HEAD_DIM)
        yield matrix(prefix + "self_attn.o_proj.weight", _HIDDEN, query, residual / math.sqrt(query))
        yield norm(prefix + "post_attention_layernorm.weight", _HIDDEN)
        yield matrix(prefix + "mlp.gate_proj.weight", _FFN, _HIDDEN, std)
        yield matrix(prefix + "mlp.up_proj.weight", _FFN, _HIDDEN, std)
        yield matrix(prefix + "mlp.down_proj.weight", _HIDDEN, _FFN, residual / math.sqrt(_FFN))
    yield norm("model.norm.weight", _HIDDEN)
    yield matrix("lm_head.weight", vocab_size, _HIDDEN, 0.02)


def _write_tokenizer(folder: str) -> int:
    """Train and write a byte-level BPE tokenizer with one token per digit. Returns its size.

    Its corpus does not depend on the seed, so every run has the same ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = byte_level.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    _write_json(
        os.path.join(folder, "tokenizer_config.json"),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[EOS_ID],
            "pad_token": SPECIAL_TOKENS[PAD_ID],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer.get_vocab_size()


def _corpus() -> Iterator[str]:
    rng = random.Random(1234)
    for _ in range(1000):
        problem = sums(rng, "train")
        answer = worked_answer(problem) if rng.random() < 0.5 else snap_answer(problem, rng)
        yield f"<|user|>{problem.question}<|end|><|assistant|>{answer}"


def _config(vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "use_cache": True,
    }


def _write_json(path: str, content: dict[str, object]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")

"""Write a tiny Hugging Face model folder: config.json, a tokenizer with a chat template, random weights.

Imports no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from megarl.config.hf_config import ModelShape
from megarl.files.writing import writing
from megarl.new.tiny_config import TinySizes, hf_config
from megarl.reshard.atlas import EMBEDDING, KEPT_IN_FP32, OUTPUT, hf_sizes

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
PAD_ID, EOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{m.role}}|>{{m.content}}<|end|>{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_BYTE_TOKENS = 256 + len(SPECIAL_TOKENS)
"""Tokens of a tokenizer without merges."""


def write_tiny_model(
    folder: str | os.PathLike[str],
    sizes: TinySizes,
    texts: Iterable[str] = (),
    vocab_size: int = NUM_BYTE_TOKENS,
    seed: int = 0,
    weights: bool = True,
) -> ModelShape:
    """Write a model folder and return the model's shape. The same arguments give the same bytes.

    Args:
        sizes: must have no errors (`size_errors`).
        texts: what the tokenizer learns merges from, until it has `vocab_size` tokens.
        seed: of the weights.
        weights: False leaves them out; training then needs --random-init.
    """
    folder = Path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        num_tokens = write_tokenizer(folder, texts, vocab_size, sizes.context)
        # transformers reads every tokenizer of a qwen2 as Qwen2Tokenizer, which adds <|endoftext|>
        num_rows = num_tokens + (sizes.family == "qwen2")
        _write_json(folder / "config.json", hf_config(sizes, num_rows, EOS_ID, PAD_ID))
        _write_json(folder / "generation_config.json", {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
        shape = ModelShape.load(folder)
        (folder / "model.safetensors").unlink(missing_ok=True)
        if weights:
            _write_safetensors(folder / "model.safetensors", initial_weights(shape, seed), sizes.dtype)
    return shape


def write_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int, context: int) -> int:
    """Train and write a byte-level BPE tokenizer with a token for each digit. Returns its number of tokens.

    It has a token for every byte, so that every text can be encoded, and merges of bytes that are frequent in
    `texts`. Without texts a letter is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[EOS_ID],
            "pad_token": SPECIAL_TOKENS[PAD_ID],
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer.get_vocab_size()


def initial_weights(shape: ModelShape, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, fp32 array) of every weight, in checkpoint order.

    The scales decide how fast so small a model learns (measured on the quickstart's): embeddings 0.3, output
    layer 0.02, every other matrix 1/sqrt(fan_in), those that write into the residual stream divided by
    sqrt(2 * layers). Norms are 1 (0 where they multiply by 1 + weight), biases 0.
    """
    # RandomState, not Generator: NumPy promises this stream never changes, so a seed means the same weights
    # everywhere.
    rng = np.random.RandomState(seed)
    # Gemma multiplies embeddings by sqrt(hidden) and uses them as the output layer too.
    embedding = 0.3 / math.sqrt(shape.hidden_size) if shape.scaled_embeddings else 0.3
    residual = 1 / math.sqrt(2 * shape.num_layers)
    for name, (rows, columns) in hf_sizes(shape).items():
        if columns == 1:
            is_norm = "norm" in name and name.endswith(".weight")
            value = 1.0 if is_norm and not shape.zero_centered_norms else 0.0
            yield name, np.full(rows, value, dtype=np.float32)
            continue
        std = {EMBEDDING: embedding, OUTPUT: 0.02}.get(name, 1 / math.sqrt(columns))
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            std = residual / math.sqrt(columns)
        yield name, (rng.standard_normal((rows, columns)) * std).astype(np.float32)


def _write_safetensors(path: Path, weights: Iterable[tuple[str, np.ndarray]], dtype: str) -> None:
    """Write the weights in `dtype`, float32 or bfloat16; corrections of routers stay in fp32."""
    from safetensors import TensorSpec, serialize

    arrays = dict(weights)  # alive until they are serialized
    specs = {}
    for name, array in arrays.items():
        kept = dtype == "float32" or name.endswith(KEPT_IN_FP32)
        arrays[name] = stored = array if kept else _bfloat16(array)
        specs[name] = TensorSpec(
            dtype="float32" if kept else "bfloat16",
            shape=array.shape,
            data_ptr=stored.ctypes.data,
            data_len=stored.nbytes,
        )
    path.write_bytes(serialize(specs, metadata={"format": "pt"}))


def _bfloat16(array: np.ndarray) -> np.ndarray:
    """Return finite fp32 values rounded to bf16, to nearest even, as the uint16 that hold their bits."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""The quickstart's model: a Qwen3 of 368,128 parameters with its own tokenizer and random initial weights."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

from megarl.new.tiny_config import TinySizes
from megarl.new.tiny_model import EOS_ID, PAD_ID, write_tiny_model
from sums.problems import snap_answer, sums, worked_answer

__all__ = ["EOS_ID", "PAD_ID", "write_model_folder"]

_SIZES = TinySizes(family="qwen3", hidden=128, layers=2, heads=4, kv_heads=2, ffn=256)
_VOCAB_SIZE = 320


def write_model_folder(folder: str | os.PathLike[str], seed: int) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and model.safetensors (fp32, from
    `seed`)."""
    write_tiny_model(folder, _SIZES, _corpus(), _VOCAB_SIZE, seed)


def _corpus() -> Iterator[str]:
    """Yield what the tokenizer is trained on: the same for every seed, so that every run has the same ids."""
    rng = random.Random(1234)
    for _ in range(1000):
        problem = sums(rng, "train")
        answer = worked_answer(problem) if rng.random() < 0.5 else snap_answer(problem, rng)
        yield f"<|user|>{problem.question}<|end|><|assistant|>{answer}"

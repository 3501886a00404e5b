"""Draw random weights that are the same however the model is split over ranks.

They are the weights of a whole model (--random-init) or the initial weights of adapters."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import ORIGIN, VALUE_HEAD, Atlas, Sizes, hf_sizes


@torch.no_grad()
def random_weights(
    shape: ModelShape, atlas: Atlas, parameters: dict[str, torch.Tensor], seed: int, std: float = 0.02
) -> None:
    """Fill this rank's parameters with random weights that are the same however the model is split over
    ranks.

    Norms are 1 (0 where they multiply by 1 + weight). Biases and value heads are 0. Matrices are N(0, std).
    Each full matrix is drawn from a generator that is seeded by its name, so that any split of the matrix
    holds the same numbers. Vocabulary padding is 0."""
    norm = 0.0 if shape.zero_centered_norms else 1.0
    _fill(
        atlas,
        hf_sizes(shape),
        parameters,
        lambda name, rows, cols: _full_tensor(name, rows, cols, seed, std, norm),
    )


@torch.no_grad()
def initial_adapters(atlas: Atlas, sizes: Sizes, parameters: dict[str, torch.Tensor], seed: int) -> None:
    """Initialise adapters as PEFT does: A uniform in +-1 / sqrt(in), B 0. The model's output does not change.

    Args:
        atlas: this rank's atlas, with adapters. Other parameters are left as they are.
        sizes: sizes of every canonical tensor of the adapters (`adapter_sizes`)."""

    def values(name: str, rows: int, cols: int) -> torch.Tensor:
        if name.endswith(".lora_B.weight"):
            return torch.zeros(rows, cols)
        return torch.empty(rows, cols).uniform_(-(cols**-0.5), cols**-0.5, generator=_generator(name, seed))

    _fill({name: local for name, local in atlas.items() if ".adapter." in name}, sizes, parameters, values)


def _fill(
    atlas: Atlas,
    sizes: Sizes,
    parameters: dict[str, torch.Tensor],
    values: Callable[[str, int, int], torch.Tensor],
) -> None:
    """Fill each parameter with this rank's part, by its atlas (sharding spec), of the Hugging Face tensors
    that values(name, rows, cols) returns. The rest is 0."""
    for name, local in atlas.items():
        target = parameters[name].zero_()
        for piece in local.pieces:
            full = values(piece.hf_name, *sizes[piece.hf_name])
            piece.inside(target).copy_(full[piece.box.within(ORIGIN)])


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(name.encode()))


def _full_tensor(name: str, rows: int, cols: int, seed: int, std: float, norm: float) -> torch.Tensor:
    if "norm" in name:
        return torch.full((rows, cols), norm)
    if name.endswith("bias") or name == VALUE_HEAD:  # `load_hf` starts with values of 0 too
        return torch.zeros(rows, cols)
    return torch.randn(rows, cols, generator=_generator(name, seed)) * std

"""Random weights for --random-init, the same under every layout."""

from __future__ import annotations

import zlib

import torch

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import VALUE_HEAD, Atlas, hf_atlas


@torch.no_grad()
def random_weights(shape: ModelShape, atlas: Atlas, parameters: dict[str, torch.Tensor], seed: int, std: float = 0.02) -> None:
    """Fill this rank's shards: norms 1 (0 where they multiply by 1 + weight), biases and value heads 0, matrices N(0, std), each full matrix drawn from a generator of its own
    name, so that any split of it holds the same numbers. Vocabulary padding is 0."""
    full = hf_atlas(shape)
    for name, local in atlas.items():
        target = parameters[name].zero_()
        for piece in local.pieces:
            values = _full_tensor(piece.hf_name, full[piece.hf_name].rows, full[piece.hf_name].cols, seed, std) - (
                shape.zero_centered_norms and "norm" in piece.hf_name)
            part = values[piece.row_start : piece.row_end, piece.col_start : piece.col_end]
            target[piece.local_row : piece.local_row + part.shape[0], piece.local_col : piece.local_col + part.shape[1]] = part


def _full_tensor(name: str, rows: int, cols: int, seed: int, std: float) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(rows, cols)
    if name.endswith("bias") or name == VALUE_HEAD:  # values of 0, as `load_hf` begins with
        return torch.zeros(rows, cols)
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(name.encode()))) * std

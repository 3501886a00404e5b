"""Find the optimizers inside Megatron's chained optimizer, and this rank's part of their tensors."""

from __future__ import annotations

from typing import Any

import torch


def inner_optimizers(optimizer: Any) -> list:
    """Return the optimizers of this rank: one for experts, and one for all other parameters.

    A rank without parameters of a kind has no optimizer for them. None (a frozen model) has no parts."""
    found = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in found if getattr(inner, "optimizer", None) is not None]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and other tensors as they are."""
    return getattr(tensor, "_local_tensor", tensor)

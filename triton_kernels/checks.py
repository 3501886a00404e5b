"""Checks of arguments that several ops make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ValueError unless `value` is one of the values of the Literal `choices`."""
    if value not in get_args(choices):
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(get_args(choices))}")


def check_column(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Raise ValueError unless the tensor is [N] like another one."""
    if tensor.shape != like.shape or like.ndim != 1:
        raise ValueError(
            f"{name} must be [N] like {like_name}, got {list(tensor.shape)} with {like_name} "
            f"{list(like.shape)}"
        )


def check_constants(constants: Mapping[str, Tensor | None]) -> None:
    """Raise ValueError if a tensor requires a gradient, because no loss computes its gradient."""
    for name, tensor in constants.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, but the loss has none for it: pass {name}.detach()"
            )


def check_mask(mask: Tensor, like_name: str, like: Tensor) -> None:
    """Raise ValueError unless the mask is bool and has the shape of `like`."""
    if mask.shape != like.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be bool {list(like.shape)} like {like_name}, got {mask.dtype} {list(mask.shape)}"
        )


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless cu_seqlens is int [B + 1] and goes up from 0 to num_tokens.

    The values are checked only where reading them does not stop a stream."""
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [B + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device.type == "cpu":
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != num_tokens or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must go up from 0 to the number of tokens ({num_tokens}), got "
                f"{cu_seqlens.tolist()[:10]}"
                f"{'...' if len(cu_seqlens) > 10 else ''} ending at {int(cu_seqlens[-1])}"
            )


def check_targets(
    targets: Tensor, rows: Tensor, name: str, vocab_size: int, num_columns: int, temperature: float
) -> None:
    """Raise ValueError unless `targets` are token ids of the rows of a tensor.

    Token ids are read only on a CPU, because reading them elsewhere would stop the stream.

    Args:
        name: name of the tensor with the rows.
        num_columns: columns of the logits on all tensor-parallel ranks."""
    if targets.dtype != torch.int64 or targets.shape != rows.shape[:1] or targets.device != rows.device:
        raise ValueError(
            f"targets must be int64 [{len(rows)}] on {rows.device} like the rows of {name}, "
            f"got {targets.dtype} {list(targets.shape)} on {targets.device}"
        )
    if not 1 <= vocab_size <= num_columns:
        raise ValueError(
            f"vocab_size ({vocab_size}) must be in [1, {num_columns}]: the columns of the logits on all "
            "tensor-parallel ranks"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature ({temperature}) must be positive and finite; greedy decoding has no "
            "log-probs to train on"
        )
    if targets.device.type == "cpu" and len(targets):
        smallest, largest = (x.item() for x in targets.aminmax())
        if smallest < 0 or largest >= vocab_size:
            bad = smallest if smallest < 0 else largest
            raise ValueError(
                f"targets must be token ids in [0, vocab_size), got {bad} with vocab_size ({vocab_size})"
            )

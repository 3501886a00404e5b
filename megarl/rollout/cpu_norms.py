"""RMSNorm on CPU by vLLM's own C++ kernels.

vLLM 0.32 has them but chooses eight PyTorch operations for each norm of an eager CPU engine: one tenth of a
decode step of a small model. Providers of an operation are registered, and chosen by the engine argument
`ir_op_priority`; others are used where `supports_args` says no."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir

from megarl.rollout.names import CPU_NORMS

_VECTOR = 16  # elements that the kernels take at once; they handle no remainder


def register() -> None:
    """Make the provider known. Repeatable."""
    if CPU_NORMS in ir.ops.rms_norm.supported_providers():
        return
    ir.ops.rms_norm.register_impl(CPU_NORMS, supports_args=_supports_rms_norm)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        CPU_NORMS, supports_args=_supports_fused_add_rms_norm, inplace=True
    )(_fused_add_rms_norm)


def _supports_rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % _VECTOR == 0
    )


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def _supports_fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return (
        _supports_rms_norm(x, weight, epsilon, variance_size)
        and x_residual.dtype == x.dtype
        and x.is_contiguous()
    )


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual

"""Run RMSNorm on CPU with vLLM's own C++ kernels.

vLLM 0.32 has these kernels, but an eager CPU engine runs eight PyTorch operations per norm instead. They take
one tenth of a decode step of a small model. vLLM registers providers of an operation and chooses one by the
engine argument `ir_op_priority`. vLLM uses another provider where `supports_args` returns False."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir

from megarl.rollout.names import CPU_NORMS

_VECTOR = 16  # elements per kernel iteration; the kernels handle no remainder


def register() -> None:
    """Register vLLM's C++ kernels as a provider of RMSNorm. Repeated calls do nothing."""
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

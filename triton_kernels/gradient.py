"""Autograd of losses whose gradient is computed in the forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_gradient(compute: Callable[..., tuple[Tensor, ...]], x: Tensor, *constants: object) -> tuple:
    """Return the loss and the statistics that `compute` returns. The loss is differentiable in `x` only.

    `compute` maps x and the constants to (loss, gradient of x, statistics ...)."""
    return _WithGradient.apply(compute, x, *constants)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, compute, x, *constants):
        loss, gradient, *stats = compute(x, *constants)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(*stats)
        return loss, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        (gradient,) = ctx.saved_tensors
        return None, gradient * grad_loss, *[None] * (len(ctx.needs_input_grad) - 2)

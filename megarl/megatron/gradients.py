"""fp32 accumulation of bf16 gradients on a CPU."""

from __future__ import annotations

import torch

_PIECE = 2**18  # elements; the fp32 copy of a piece stays in the cache


def accumulate_in_pieces(model: torch.nn.Module) -> None:
    """Let parameters add their gradient to main_grad a piece at a time. After Megatron's DDP was built.

    Megatron's own hook says `main_grad.add_(grad)`; for fp32 and bf16 PyTorch then makes an fp32 copy of the whole gradient: half a
    gigabyte for the embedding of 0.5B parameters, and more time than the sum. `grad_added_to_main_grad` is how layers that fuse
    the accumulation tell it that nothing is left to do; `zero_out_wgrad` on a tied embedding would say that something is."""
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.zero_out_wgrad = False
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def _add_to_main_grad(parameter: torch.Tensor) -> None:
    if parameter.grad is None:  # the output layer's went into main_grad in the forward pass
        return
    for total, grad in zip(
        parameter.main_grad.flatten().split(_PIECE), parameter.grad.flatten().split(_PIECE), strict=True
    ):
        total.add_(grad)
    parameter.grad_added_to_main_grad = True

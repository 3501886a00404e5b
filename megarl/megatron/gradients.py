"""Sum gradients over micro-batches on a CPU without large copies, and report the factors by which DDP scales
gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_PIECE = 2**18  # elements; the fp32 copy of a piece stays in the cache


def accumulate_in_pieces(model: torch.nn.Module) -> None:
    """Make parameters add their gradient to main_grad one piece at a time.

    Call this after Megatron's DDP was built. Megatron's own hook calls `main_grad.add_(grad)`. For fp32 and
    bf16 PyTorch then makes an fp32 copy of the whole gradient. For the embedding of 0.5B parameters the copy
    takes half a gigabyte and more time than the sum. `grad_added_to_main_grad` tells Megatron's hook that
    nothing is left to do; layers that fuse the accumulation use the same flag. `zero_out_wgrad` on a tied
    embedding would tell the hook the opposite."""
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.zero_out_wgrad = False
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def _add_to_main_grad(parameter: torch.Tensor) -> None:
    if parameter.grad is None:  # the output layer wrote main_grad in the forward pass
        return
    for total, grad in zip(
        parameter.main_grad.flatten().split(_PIECE), parameter.grad.flatten().split(_PIECE), strict=True
    ):
        total.add_(grad)
    parameter.grad_added_to_main_grad = True


def reduction_factors(wrapped: Iterable[torch.nn.Module], num_replicas: int) -> set[float]:
    """Return the factors that DDP or Megatron-FSDP applies to gradients when data-parallel ranks sum them.

    The result is {1.0} if the gradients are only summed."""
    factors: set[float] = set()
    for ddp in wrapped:
        if ddp.ddp_config.use_megatron_fsdp:
            buffer = ddp.param_and_grad_buffer
            found = [buffer.gradient_scaling_factor, buffer.expert_gradient_scaling_factor]
        else:
            groups = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
            found = [bucket.gradient_scaling_factor for group in groups for bucket in group.buckets]
        mean = 1 / num_replicas if ddp.ddp_config.average_in_collective else 1.0
        factors |= {mean * (1.0 if factor is None else factor) for factor in found}
    return factors

"""Wrap the chunks of a model for data-parallel training, by Megatron's DDP or Megatron-FSDP."""

from __future__ import annotations

import torch

from megarl.config.mesh import MeshSpec
from megarl.config.schema import OptimizerConfig
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.fsdp import ShardedDataParallel
from megarl.megatron.gradients import accumulate_in_pieces

with cpu_megatron():
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


def data_parallel(
    chunks: list[GPTModel],
    config: TransformerConfig,
    optimizer: OptimizerConfig,
    mesh: MeshSpec,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> list[DistributedDataParallel | ShardedDataParallel]:
    """Return the wrapped chunks, and give `config` the functions by which Megatron's schedules reduce gradients.

    Collective over the mesh."""
    # Losses are already divided by global denominators, so Megatron gets no token count to divide by.
    config.finalize_model_grads_func = lambda chunks, num_tokens, **kwargs: finalize_model_grads(
        chunks, None, pg_collection=groups
    )
    for chunk in chunks:
        chunk.accumulates_into_main_grad = not (optimizer.overlap_grad_reduce or optimizer.use_megatron_fsdp)
    if optimizer.use_megatron_fsdp:
        (chunk,) = chunks
        strategy = optimizer.data_parallel_sharding_strategy
        ddp = [ShardedDataParallel(config, chunk, strategy, mesh, groups, device)]
    else:
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=optimizer.use_distributed_optimizer,
            overlap_grad_reduce=optimizer.overlap_grad_reduce,
            grad_reduce_in_fp32=True,
        )
        # The gradients of later chunks are ready while the backward pass of the first one still runs.
        # Reducing parts of them would gain nothing.
        ddp = [
            DistributedDataParallel(
                config, ddp_config, chunk, disable_bucketing=number > 0, pg_collection=groups
            )
            for number, chunk in enumerate(chunks)
        ]
        if config.bf16 and device.type == "cpu":
            for chunk in chunks:
                accumulate_in_pieces(chunk)
    config.no_sync_func = [chunk.no_sync for chunk in ddp] if len(ddp) > 1 else ddp[0].no_sync
    return ddp

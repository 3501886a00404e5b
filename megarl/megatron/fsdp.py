"""Wrap a model for Megatron-FSDP over the process groups of one role (actor, critic), not of the whole world.

Adam's states, master weights and gradients are sharded over the data-parallel ranks. Megatron-Core 0.19.2 has
four faults here, which the class below corrects:

    mcore_fsdp_adapter.py:562         device meshes come from the whole world
    mcore_fsdp_adapter.py:449         device meshes are CUDA's; so is the device name of megatron_fsdp.py:234
    megatron_fsdp.py:761, :1334       strategy optim reduces its gradients twice: at the end of the last
                                      backward pass and when they are finished
    distrib_optimizer.py:3080         nothing copies weights that were loaded into the master weights"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from megarl.config.mesh import MeshSpec
from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import FSDPDistributedIndex
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


BUCKET_ELEMENTS = 40_000_000
"""Number of gradient elements that are reduced together, unless one parameter has more."""


class ShardedDataParallel(FullyShardedDataParallel):
    """A model wrapped for Megatron-FSDP, in the place of DistributedDataParallel.

    Construction is collective over the mesh. The model has two sets of parameters with the same names: whole
    parameters for passes, and DTensors with this rank's shards for the optimizer. Weights stay whole between
    passes. Both sets share memory where there are no master weights.

    Args:
        strategy: what is sharded: optim (states and master weights) or optim_grads (gradients too)."""

    def __init__(
        self,
        config: TransformerConfig,
        model: GPTModel,
        strategy: str,
        mesh: MeshSpec,
        groups: ProcessGroupCollection,
        device: torch.device,
    ) -> None:
        assert strategy in ("optim", "optim_grads"), (
            f"{strategy}: nobody could read the weights between passes"
        )
        self._mesh = mesh
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=strategy,
            grad_reduce_in_fp32=True,
            megatron_fsdp_main_params_dtype=torch.float32 if config.bf16 else None,
            megatron_fsdp_main_grads_dtype=torch.float32,
            bucket_size=BUCKET_ELEMENTS,
        )
        with _device_number(device):
            super().__init__(config, ddp_config, model, device=device, pg_collection=groups)
        self.no_sync = contextlib.nullcontext if strategy == "optim" else self.no_sync

    @property
    def whole_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The unsharded parameters, which passes use, by their names in the model."""
        return self.module.raw_param

    def optimized(self) -> Iterator[tuple[torch.nn.Parameter, int, torch.nn.Parameter]]:
        """Yield (unsharded parameter, index of the first element of this rank's shard, shard that the
        optimizer updates).

        A shard may be empty."""
        for _, shard in self.param_and_grad_buffer.optimizer_named_parameters:
            yield shard.orig_param, shard.megatron_fsdp_slice.start, shard

    def reload_masters(self) -> None:
        """Copy the weights into the master weights after a direct write into the weights.

        The optimizer's reload_model_params refuses this (distrib_optimizer.py:3080)."""
        for group in self.param_and_grad_buffer.parameter_groups:
            masters, weights = group.main_weight_buffer, group.model_weight_buffer
            if masters is not None:
                is_shard = masters.is_data_distributed
                masters.data.copy_(weights.get_shard_from_local_buffer() if is_shard else weights.data)

    def use_whole(self) -> None:
        """Put the unsharded parameters into the model's modules before a forward pass."""
        self.module._replace_param_with_raw_if_needed()

    def _init_dist_index(self, groups: ProcessGroupCollection) -> FSDPDistributedIndex:
        self.tp_group = groups.tp
        ranks = [
            list(self._mesh.peers(first, "tp")) for first in self._mesh.peers(dist.get_rank(), "cp", "dp")
        ]
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = DeviceMesh.from_group(
            [groups.dp_cp, groups.tp], kind, mesh=ranks, mesh_dim_names=("dp_cp", "tp")
        )
        return FSDPDistributedIndex(mesh, dp_shard_dim="dp_cp", tp_dim="tp")


@contextlib.contextmanager
def _device_number(device: torch.device) -> Iterator[None]:
    """Make torch.cuda.current_device() return 0 on a CPU, and silence the warning that follows. On a GPU, do
    nothing.

    Megatron-FSDP compares the device with f"cuda:{torch.cuda.current_device()}" and warns if they differ."""
    if device.type == "cuda":
        yield
        return
    logger = logging.getLogger("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp")
    with patch.object(torch.cuda, "current_device", lambda: 0), patch.object(logger, "disabled", True):
        yield

"""Wrap a model for Megatron-FSDP over the process groups of one role (actor, critic), not of the whole world.

Adam's states, master weights and gradients are sharded over the data-parallel ranks. Megatron-Core 0.16.1 has
four faults here, which the class below corrects:

    mcore_fsdp_adapter.py:159, :370   tensor parallelism comes from the global parallel_state, and device
                                      meshes come from the whole world
    mcore_fsdp_adapter.py:276         device meshes are CUDA's; so is the device name of megatron_fsdp.py:184
    megatron_fsdp.py:1326             the chunk's forward runs without its hooks, also without the hook that
                                      ends a backward pass; gradients of the next micro-batch are then added
                                      to buckets that still wait (Megatron-LM has Float16Module between, in
                                      bf16)
    megatron_fsdp.py:660, :1174       strategy optim reduces its gradients twice: at the end of the last
                                      backward pass and when they are finished"""

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
            preserve_fp32_weights=config.bf16,
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

        The optimizer's reload_model_params does nothing here (distrib_optimizer.py:2553)."""
        self.param_and_grad_buffer.copy_model_weights_to_main_weights()

    def use_whole(self) -> None:
        """Put the unsharded parameters into the model's modules before a forward pass."""
        self.module._replace_param_with_raw_if_needed()

    def forward(self, *args: object, **kwargs: object) -> object:
        self.use_whole()
        return self.module.module(*args, **kwargs)

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

    def _fix_tensor_parallel_attributes(self, module: torch.nn.Module) -> None:
        """Do nothing, because the tensor-parallel size is 1."""


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

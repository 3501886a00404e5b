"""Extend vLLM's CPU worker by uniquely named shared memory and our sampler."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

import torch.distributed as dist
from vllm.config import VllmConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from megarl.collectives import all_gather_messages
from megarl.rollout.cpu_sampler import PositionSampler
from megarl.rollout.engine_memory import SHM_PREFIX
from megarl.rollout.environment import ENGINE_OF


class NamedCPUWorker(CPUWorker):
    """A CPU worker whose shared memory has a unique name that contains its owner's pid.

    vLLM names the shared memory of a tensor-parallel group after the last ':' part of the init method (a
    file's last '/' part). Under the external launcher that part is the same in every job. A second job on the
    machine, or one after a crash, finds the name in use. In vLLM's own processes the part is a file's name
    without an owner, so nobody could ever remove it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ):
        if dist.is_initialized():
            method = f"env://:{_unique_name()}"
        else:  # file:///tmp/vllm_dist_<unique>, the same for all ranks of this engine
            file, owner = (
                Path(distributed_init_method.removeprefix("file://")),
                os.environ[ENGINE_OF].split("/")[0],
            )
            method = f"file://{file.parent}/{SHM_PREFIX}{owner}-{file.name.removeprefix('vllm_dist_')}"
        super().__init__(vllm_config, local_rank, rank, method, is_driver_worker)

    def init_device(self) -> None:
        super().init_device()
        sampler = self.model_runner.sampler
        sampler.topk_topp_sampler = PositionSampler(
            self.model_runner, sampler.logprobs_mode, sampler.use_fp64_gumbel
        )


def _unique_name() -> str:
    """Return a name shared by all ranks of a machine: megarl-<pid of its first rank>-<drawn by rank 0>.

    Collective over the world."""
    own = (socket.gethostname(), os.getpid(), uuid.uuid4().hex[:8])
    everyone = all_gather_messages(own, tuple[str, int, str])
    pid = next(pid for host, pid, _ in everyone if host == socket.gethostname())
    return f"{SHM_PREFIX}{pid}-{everyone[0][2]}"

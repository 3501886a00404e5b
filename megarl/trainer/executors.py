"""Choose the executor of a training job by name (--executor).

    torchrun    ranks are processes, started by torchrun or by `megarl train` itself
    ray         ranks are processes on the nodes of a Ray cluster
    inline      this process is the only rank: a debugger stops where the error is

`register_executor` adds another executor."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.errors import ConfigError
from megarl.config.render import write_args
from megarl.config.mesh import hosting_ranks
from megarl.config.roles import trains_in_fp32
from megarl.config.run_sections import EXECUTORS
from megarl.config.schema import TrainConfig
from megarl.flow import role_class
from megarl.role_names import kind_and_suffix
from megarl.rollout.engine_memory import sweep_shared_memory
from megarl.runtime.process import compute_fp32_exactly, keep_checkout_off_path, quiet_libraries

if TYPE_CHECKING:
    from megarl.runtime.executor import Executor
    from megarl.runtime.inline_executor import InlineExecutor
    from megarl.runtime.rank_processes import JobRanks
    from megarl.runtime.store_executor import StoreExecutor

ExecutorFactory = Callable[[TrainConfig, int], AbstractContextManager["Executor"]]
"""Function (configuration, number of ranks) -> the executor of the job, as a context manager.

The roles can be called within the context."""


def open_executor(config: TrainConfig, world_size: int) -> AbstractContextManager[Executor]:
    """Return a context manager that starts the ranks of a job, gives their executor, and ends them. This
    process is the driver."""
    return _FACTORIES[config.placement.executor](config, world_size)


def has_rank_processes(config: TrainConfig) -> bool:
    """Return whether the ranks are processes that run `megarl.train`.

    Otherwise the job needs only `open_executor`."""
    return config.placement.executor in ("torchrun", "ray")


def shared_folder(config: TrainConfig) -> str | None:
    """Return the folder for temporary files that all ranks of a job read; None is the default one.

    Other nodes see the working directory, but not this machine's /tmp. Ray may start a single rank on any
    node."""
    placement = config.placement
    return os.getcwd() if placement.nnodes > 1 or placement.executor == "ray" else None


def register_executor(name: str, factory: ExecutorFactory) -> None:
    """Let --executor `name` mean the executor that `factory` makes. Call this before a configuration names
    it."""
    _FACTORIES[name] = factory
    if name not in EXECUTORS:
        EXECUTORS.append(name)


@contextlib.contextmanager
def rank_processes(config: TrainConfig, world_size: int) -> Iterator[StoreExecutor]:
    """Start every rank as a process, give their executor to the `with` block, and end them after it."""
    from megarl.runtime.local_ranks import started

    if config.placement.elastic_min_nodes is not None:  # the caller's loop knows one number of ranks
        raise ConfigError(
            ["--elastic-min-nodes: is for megarl train, which restarts the job. Leave it out here."]
        )
    ranks = hosting_ranks(config, world_size)
    with tempfile.TemporaryDirectory(prefix="megarl-", dir=shared_folder(config)) as folder:
        arguments = Path(folder) / "job.args"
        arguments.write_text(write_args(config))
        processes = job_ranks(config, [f"@{arguments}"], world_size)
        timeout_s = config.placement.call_timeout_s
        with started(processes, ranks, timeout_s, interfaces_of(ranks)) as executor:
            yield executor


def job_ranks(
    config: TrainConfig, argv: list[str], world_size: int, module: str = "megarl.train", attempt: int = 0
) -> JobRanks:
    """Return the processes of a job's ranks, `python -m module argv`, which are not started yet: on this
    machine, or with --executor ray in a Ray cluster.

    Args:
        attempt: number of earlier starts of the job."""
    describe = rank_description(hosting_ranks(config, world_size))
    placement = config.placement
    # torch: cleanup cannot run if a signal interrupts these imports
    if placement.executor == "ray":
        from megarl.runtime.ray_ranks import RayRanks

        sizes = placement.nnodes, placement.nproc_per_node
        return RayRanks(argv, *sizes, placement.ray_address, module, describe, sweep_shared_memory, attempt)
    from megarl.runtime.local_ranks import LocalRanks

    return LocalRanks(argv, world_size, module, describe, sweep_shared_memory, attempt)


@contextlib.contextmanager
def inline_ranks(config: TrainConfig, world_size: int = 1) -> Iterator[InlineExecutor]:
    """Make this process the only rank of a job: build the roles, and give their executor to the `with`
    block."""
    quiet_libraries()
    keep_checkout_off_path()
    if trains_in_fp32(config):
        compute_fp32_exactly()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    from megarl.runtime.inline_executor import InlineExecutor
    from megarl.workers.worker import build_roles, join_world

    join_world(config.placement.call_timeout_s)
    executor = InlineExecutor(
        lambda context: build_roles(config, world_size, context),
        interfaces_of(hosting_ranks(config, world_size)),
    )
    yield executor
    executor.shutdown()


_FACTORIES: dict[str, ExecutorFactory] = {
    "torchrun": rank_processes,
    "ray": rank_processes,
    "inline": inline_ranks,
}


def interfaces_of(roles: Iterable[str]) -> dict[str, type]:
    """Return role -> the class of megarl/flow that declares its methods, e.g. "critic_2" -> Critic.

    Its annotations give the return types of the role's methods."""
    return {role: role_class(role) for role in roles}


def rank_description(ranks: Mapping[str, Sequence[int]]) -> Callable[[int], str]:
    """Return a function that describes a rank by its roles: "1: actor, critic".

    Data, rewards and the profiler accompany other roles and are left out."""

    def describe(rank: int) -> str:
        roles = ", ".join(
            role
            for role, of_role in ranks.items()
            if rank in of_role and kind_and_suffix(role)[0] not in ("data", "reward", "profiler")
        )
        return f"{rank}: {roles}" if roles else str(rank)

    return describe

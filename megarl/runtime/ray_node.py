"""Host the ranks of one node of a Ray cluster: the class of the actor that takes the place of torchrun's agent."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Callable, Mapping, Sequence

from megarl.runtime.network import GLOO_INTERFACE, NCCL_INTERFACE, interface_of
from megarl.runtime.process import DRIVER_PID, rank_command, without_rank
from megarl.runtime.rank_processes import RankDied, RankProcesses

DIRECT_VARIABLES = (
    "MEGARL_",
    "VLLM_",
    "TORCH",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "NVTE_",
    "TRITON_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTHON",
    "LD_LIBRARY_PATH",
)
"""Beginnings of the names of variables that the driver hands to the ranks of all nodes."""
DIED, SIGNALLED = "died", "signalled"
NodeReport = tuple[str, int | None, int]
"""DIED with a rank of this node and its exit code, or SIGNALLED with None and the signal that ended a rank."""


class RayNode:
    """Starts the ranks of its node as processes of their own, reports those that die, and ends them.

    A rank is not the actor itself: Ray's worker has signal handlers and exits of its own, and a rank's main
    thread belongs to its worker loop. The ranks end with this process, which Ray ends with the driver."""

    def __init__(self) -> None:
        self._reports: queue.SimpleQueue[NodeReport | None] = queue.SimpleQueue()
        self._ranks: RankProcesses | None = None

    def start(
        self,
        module: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        ranks: Sequence[int],
        folder: str,
        address: str | None,
        tidy_up: Callable[[], object],
    ) -> None:
        """Start the ranks of this node as `python -m module argv`.

        Args:
            env: variables that replace those of this process.
            ranks: ranks of this node in the world.
            folder: the driver's working directory, in which `argv` may name files.
            address: IP address by which other nodes reach this one; None if there are no others.
            tidy_up: removes what killed ranks could not remove themselves.
        Raises: OSError, if the folder is missing on this node or a process cannot be started."""
        enter(folder)
        own = without_rank(os.environ) | dict(env) | {DRIVER_PID: str(os.getpid())}
        if address is not None and (interface := interface_of(address)) is not None:
            for name in (GLOO_INTERFACE, NCCL_INTERFACE):
                own.setdefault(name, interface)
        self._ranks = RankProcesses(rank_command(module, argv), own, ranks, tidy_up=tidy_up)
        self._ranks.on_signal = self._tell_signal
        self._ranks.may_exit = lambda: False  # every end is told: the driver knows whether the job ends
        self._ranks.report_deaths(self._tell_death)
        self._ranks.start_ranks()

    def where(self) -> tuple[str, str]:
        """Return the IP address and the host name of this node."""
        return node_address(), socket.gethostname()

    def next_report(self) -> NodeReport | None:
        """Block until a rank of this node has died, and return what is known of it; None after `kill`."""
        return self._reports.get()

    def end(self, wait_s: float) -> None:
        """Wait `wait_s` seconds for the ranks to exit, then kill those that remain."""
        if self._ranks is not None:
            self._ranks.end(wait_s)

    def kill(self) -> None:
        """Kill the ranks and their child processes, without waiting."""
        if self._ranks is not None:
            self._ranks.kill()
        self._reports.put(None)

    def expect_end(self) -> None:
        """Declare that ranks may end from now on: their end is no longer reported."""
        if self._ranks is not None:
            self._ranks.expect_end()

    def _tell_death(self, death: RankDied) -> None:
        self._reports.put((DIED, int(death.description), death.code))

    def _tell_signal(self, signum: int) -> bool:
        self._reports.put((SIGNALLED, None, signum))
        return True


def enter(folder: str) -> None:
    """Make the driver's working directory that of this process. Raises: OSError, if this node lacks it."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise OSError(
            f"the folder of the driver, {folder}, cannot be entered on node {socket.gethostname()}: "
            f"{error.strerror}. Start the job in a folder that all nodes share."
        ) from None


def node_address() -> str:
    """Return the IP address by which Ray's other nodes reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())

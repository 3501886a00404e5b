"""`megarl train` starts its own ranks: torchrun's agent in this process, without torchrun's pages of text about a failed child."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)


def launch(nproc_per_node: int, argv: list[str], module: str = "megarl.train", ranks_of: Mapping[str, Sequence[int]] = {}) -> int:
    """Run `python -m module argv` as the `nproc_per_node` ranks of one job on this machine and wait for its end.

    Args:
        ranks_of: role -> its ranks, to say who was on a rank that was killed.
    Returns: 0; 1 if a rank failed (the job has said why); 2 if the job could not start as it is; 128 + n after signal n (130: Ctrl-C).
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default too
    os.environ["PYTHONSAFEPATH"] = "1"  # or `triton_kernels/` of a checkout passes for OpenAI's package of that name
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc_per_node, max_restarts=0, monitor_interval=0.1,
        run_id=str(uuid.uuid4()), rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    logging.disable(logging.ERROR)  # of the agent: it would repeat that a child failed, and with which exit code
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *argv)
    except ChildFailedError as error:
        logging.disable(logging.NOTSET)
        return _report_kills({rank: failure.exitcode for rank, failure in error.failures.items()}, ranks_of)
    except SignalException as error:
        return 128 + error.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _report_kills(exit_codes: dict[int, int], ranks_of: Mapping[str, Sequence[int]]) -> int:
    """A rank that failed has been heard through the driver; one that was killed could not say anything. Returns the exit code.

    A rank that found its own job impossible to start exits with 2, as the driver does; that is kept.
    """
    for rank, code in sorted(exit_codes.items()):
        if cause := cause_of_death(rank, code, ranks_of):
            logger.error(cause)
    return 2 if 2 in exit_codes.values() else 1


def cause_of_death(rank: int, code: int, ranks_of: Mapping[str, Sequence[int]]) -> str | None:
    """What is to say of a rank's exit code: nothing if it ended by itself, or by the signal that ends the others after the first."""
    roles = ", ".join(role for role, ranks in ranks_of.items() if rank in ranks)
    who = f"[rank {rank}: {roles}]" if roles else f"[rank {rank}]"
    if code == -signal.SIGKILL:
        return f"{who} was killed by SIGKILL. If nobody did that, the machine was out of memory (see dmesg)."
    if code < 0 and code != -signal.SIGTERM:
        return f"{who} died of {signal.Signals(-code).name}."
    return None

"""Check a job on the kind of machine that will run it, where the driver's own has no GPU.

python -m megarl.trainer.worker_check @job.args     on a node: check the job, read its inputs and try them"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.config.errors import ConfigError
from megarl.config.installed import installed_version, visible_gpus
from megarl.config.render import write_args
from megarl.config.schema import TrainConfig
from megarl.runtime.process import ON_WORKER, keep_checkout_off_path, quiet_libraries

if TYPE_CHECKING:
    from megarl.runtime.ray_worker import Answer

CHECK_AND_TRY = "megarl.trainer.worker_check"
"""Module that checks a job and tries its inputs, as the start of a training job does."""


def checked_on_worker(config: TrainConfig, module: str, argv: Sequence[str]) -> int | None:
    """Run `python -m module argv`, which checks the job, on a GPU node of its Ray cluster, and show what it
    prints. Returns the exit code, or None as `ask_worker`."""
    if (answer := ask_worker(config, module, argv)) is None:
        return None
    node, code, output, errors = answer
    sys.stdout.write(f"{output}checked on {node}: this machine has no GPU\n")
    sys.stdout.flush()
    sys.stderr.write(errors)
    return code


def is_checked_on_worker(config: TrainConfig) -> bool:
    """Let a GPU node of the job's Ray cluster check a configuration and try its inputs, for a program of the
    user's own. Returns False where `ask_worker` returns None.

    Raises: ConfigError with the errors that the node has found."""
    argv = shlex.split(write_args(config), comments=True)
    if (answer := ask_worker(config, CHECK_AND_TRY, argv)) is None:
        return False
    node, code, _, errors = answer
    if code:
        raise ConfigError([f"{errors.strip()} [checked on {node}]"])
    return True


def ask_worker(config: TrainConfig, module: str, argv: Sequence[str]) -> Answer | None:
    """Run `python -m module argv`, which checks the job, on a GPU node of its Ray cluster.

    The head of a cluster often has no GPU, and other packages than the nodes that train: what it says of
    memory, versions or a reward function's imports would be of no use.

    Returns: the node's answer; None if this machine has to check the job itself: it has a GPU, there is no
        cluster, or the cluster has no GPUs either.
    Raises: ConfigError, if the cluster cannot be reached."""
    address = config.placement.ray_address or os.environ.get("RAY_ADDRESS")
    is_head = config.placement.executor == "ray" and address not in (None, "local") and not visible_gpus()
    if not is_head or ON_WORKER in os.environ or installed_version("ray") is None:
        return None
    from megarl.runtime.ray_worker import run_on_gpu_node

    assert address is not None
    try:
        return run_on_gpu_node(module, argv, address)
    except (RuntimeError, OSError) as error:
        raise ConfigError([str(error)]) from None


def main(argv: list[str]) -> int:
    """Check a job and try its inputs on this machine. Returns 0, or 2 with the errors on stderr."""
    from megarl.algorithms import REGISTRY
    from megarl.checks.job import check_everything
    from megarl.config.loader import load_config
    from megarl.trainer.preflight import read_inputs

    keep_checkout_off_path()
    quiet_libraries()
    try:
        config = load_config(argv, REGISTRY)
        check_everything(config, config.placement.world_size)
        read_inputs(config, config.placement.world_size)
    except ValueError as error:  # ConfigError is one
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

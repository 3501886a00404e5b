"""Check a job on the kind of machine that will run it, where the driver's own has no GPU.

python -m megarl.trainer.worker_check @job.args     on a node: check the job, read its inputs and try them"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megarl.config.errors import ConfigError
from megarl.config.installed import installed_version, visible_gpus
from megarl.config.schema import TrainConfig
from megarl.runtime.process import ON_WORKER, keep_checkout_off_path, quiet_libraries


CHECK_AND_TRY = "megarl.trainer.worker_check"
"""Module that checks a job and tries its inputs, as the start of a training job does."""


def checked_on_worker(config: TrainConfig, module: str, argv: Sequence[str]) -> int | None:
    """Run `python -m module argv`, which checks the job, on a GPU node of its Ray cluster, and show what it
    prints.

    The head of a cluster often has no GPU, and other packages than the nodes that train: what it says of
    memory, versions or a reward function's imports would be of no use.

    Returns: the exit code; None if this machine has to check the job itself: it has a GPU, there is no cluster,
        or the cluster has no GPUs either.
    Raises: ConfigError, if the cluster cannot be reached."""
    address = config.placement.ray_address or os.environ.get("RAY_ADDRESS")
    is_head = config.placement.executor == "ray" and address not in (None, "local") and not visible_gpus()
    if not is_head or ON_WORKER in os.environ or installed_version("ray") is None:
        return None
    from megarl.runtime.ray_worker import run_on_gpu_node

    assert address is not None
    try:
        answer = run_on_gpu_node(module, argv, address)
    except (RuntimeError, OSError) as error:
        raise ConfigError([str(error)]) from None
    if answer is None:
        return None
    node, code, output, errors = answer
    sys.stdout.write(f"{output}checked on {node}: this machine has no GPU\n")
    sys.stdout.flush()
    sys.stderr.write(errors)
    return code


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

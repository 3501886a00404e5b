"""Run a command of megarl on a node of a Ray cluster that has GPUs, for a driver on a machine that has none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.runtime.process import ON_WORKER, rank_command
from megarl.runtime.ray_node import enter
from megarl.runtime.ray_ranks import forwarded, join, own_handlers

Answer = tuple[str, int, str, str]
"""Host name of the node; exit code, output and errors of a command there."""


def run_on_gpu_node(module: str, argv: Sequence[str], address: str) -> Answer | None:
    """Run `python -m module argv` on a node with GPUs. Returns None if no node of the cluster has any.

    No GPU and no core is taken: a cluster that is busy answers too.

    Raises: RuntimeError, if the cluster or the node does not answer; OSError, if the node does not have the
        driver's working directory."""
    has_joined = join(address)
    try:
        known = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = [node for node in known if node["Alive"] and node["Resources"].get("GPU", 0) > 0]
        if not nodes:
            return None
        there = NodeAffinitySchedulingStrategy(nodes[0]["NodeID"], soft=False)
        task = ray.remote(_run).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        command = rank_command(module, list(argv))
        return ray.get(task.remote(command, forwarded() | {ON_WORKER: "1"}, os.getcwd()))
    except RayError as error:
        cause = getattr(error, "cause", None)
        raise (cause if isinstance(cause, OSError) else RuntimeError(f"[driver] {error}")) from None
    finally:
        if has_joined:
            with own_handlers():
                ray.shutdown()


def _run(command: Sequence[str], env: Mapping[str, str], folder: str) -> Answer:
    """Run a command in a folder of this node."""
    enter(folder)
    # Ray hides the GPUs of this node from a task that has asked for none.
    own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [*command], env=own | dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return os.uname().nodename, done.returncode, done.stdout, done.stderr

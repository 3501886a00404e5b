"""Make the lines of an args file for the prompts, steps and ranks of verl's programs.

The asynchronous ones count them in other settings than main_ppo does."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.frameworks.rows import (
    Line,
    Settings,
    as_number,
    is_asynchronous,
    ranks_of_nodes,
    separate_ranks,
    train_iters,
)
from megarl.frameworks.verl_lines import ACTOR

FULLY_ASYNC = "--num-prompts = ppo_mini_batch_size x require_batches x trigger_parameter_sync_step"
"""How many prompts a step of verl's fully_async_policy has."""
SYNC_INTERVAL = ("async_training.require_batches", "async_training.trigger_parameter_sync_step")
"""Mini-batches that fully_async_policy trains on between two updates of the engines' weights."""
SEPARATE = (
    "--actor-ranks and --rollout-ranks give trainer and engines devices of their own, and --nnodes x "
    "--nproc-per-node counts both"
)


def prompts(settings: Settings) -> Iterator[Line]:
    """Yield the prompts of a step. fully_async_policy does not read data.train_batch_size, which is 0 in its
    scripts."""
    is_fully = any(name.startswith(("fully_async_policy", "async_training.")) for name in settings.given)
    if not is_fully or "one_step_off_policy" in settings.given:
        yield Line("num-prompts", settings["data.train_batch_size"])
        return
    sizes = [settings.number(name) for name in (f"{ACTOR}.ppo_mini_batch_size", *SYNC_INTERVAL)]
    if None in sizes:
        yield Line("", note=FULLY_ASYNC)
    else:
        yield Line("num-prompts", math.prod(sizes), FULLY_ASYNC.partition(" = ")[2])


def steps(settings: Settings) -> Iterator[Line]:
    steps, per_step = settings.number("trainer.total_training_steps"), settings.ours.get("num-prompts")
    if steps is not None and steps > 0:
        yield Line("train-iters", steps)
        return
    epochs = settings.number("trainer.total_epochs") or 1
    name = "rollout.total_rollout_steps"  # of fully_async_policy, which ends at the smaller number of prompts
    total = settings.number(name)
    if total is None or (settings.rows is not None and epochs * settings.rows < total):
        yield train_iters(epochs, settings.rows, per_step, "trainer.total_epochs")
    elif isinstance(per_step, int):
        note = f"{name} {total} // {per_step}"
        steps = total // per_step if per_step else 0
        yield Line("train-iters", steps, note) if steps else Line("", note=f"--train-iters N: {note} is 0")
    else:
        yield Line("", note=f"--train-iters = {name} {total} // --num-prompts")


def ranks(settings: Settings) -> Iterator[Line]:
    nodes, gpus = settings.number("trainer.nnodes"), settings.number("trainer.n_gpus_per_node")
    if nodes is None or gpus is None:
        yield Line("", note="--nnodes = trainer.nnodes, --nproc-per-node = trainer.n_gpus_per_node")
        return
    engine_nodes, engine_gpus = (settings.number(f"rollout.{name}") for name in ("nnodes", "n_gpus_per_node"))
    if is_asynchronous(settings) and engine_nodes and engine_gpus:
        engine = int(as_number(settings.ours.get("rollout-tensor-parallel-size")) or 1)
        room = max(gpus, engine_gpus, 8)
        yield from separate_ranks(nodes * gpus, engine_nodes * engine_gpus, engine, room)
        return
    yield from ranks_of_nodes(nodes, gpus)
    for name in ("rollout.nnodes", "rollout.n_gpus_per_node"):
        if name in settings.given:
            yield Line("", note=f"{name}={settings[name]}: {SEPARATE}")

"""Print in plain lines what a job does before its first step, and during an evaluation.

    starting 2 ranks: each imports PyTorch, Megatron-Core and vLLM first
    starting: the model of actor is ready (0.4 s)
    starting: the engine of rollout is ready (5.1 s)
    evaluating 200 prompts before the first step

The driver alone prints them. This module imports no torch: the first line comes before torch's import."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from megarl.algorithms.base import algorithm_of
from megarl.config.errors import ConfigError
from megarl.config.rules_files import newest_job
from megarl.config.rollout_backends import rollout_backend
from megarl.config.schema import TrainConfig
from megarl.files.checkpoints import JobFileError
from megarl.flow import ModelRole, Rollout, role_class
from megarl.futures import Future
from megarl.loggers.console import clock

Say = Callable[[str], object]
"""Function that shows one line to the user."""
REMIND_S = 30.0


def line_on(stream: TextIO | None = None) -> Say:
    """Return a function that writes a line to the stream at once; default: stdout."""

    def say(text: str) -> None:
        shown_on = sys.stdout if stream is None else stream
        shown_on.write(f"{text}\n")
        shown_on.flush()

    return say


def starting_text(config: TrainConfig, world_size: int) -> str:
    """Return the first line of a job: what it starts and, with --load, after which step it continues."""
    libraries = "PyTorch and Megatron-Core"
    if algorithm_of(config).needs_rollout:
        libraries = f"PyTorch, Megatron-Core and {rollout_backend(config).library}"
    whom, imports = f"{world_size} rank{'s' if world_size > 1 else ''}", "each imports"
    if config.placement.executor not in ("torchrun", "ray"):
        whom, imports = f"with --executor {config.placement.executor}", "this process imports"
    return f"starting {whom}{_place(config)}: {imports} {libraries} first"


def _place(config: TrainConfig) -> str:
    """Return where a job with --load continues, in brackets; "" if it begins at step 1."""
    try:
        found = newest_job(config) if config.checkpoint.load is not None else None
    except (JobFileError, ConfigError, OSError):
        return ""  # the checks report it
    return "" if found is None else f", to continue after step {found[1]['step']} ({found[0]})"


def wait_for_setups(setups: Mapping[str, Future[Any]], say: Say) -> None:
    """Wait until the roles are set up, and print a line for each of them, in their order.

    Args:
        setups: role -> its call of `setup`."""
    for role, setup in setups.items():
        setup.result()
        kind = role_class(role)
        thing = role
        if issubclass(kind, ModelRole):
            thing = f"the model of {role}"
        elif issubclass(kind, Rollout):
            thing = f"the engine of {role}"
        say(f"starting: {thing} is ready ({setup.seconds:.1f} s)")


@contextlib.contextmanager
def reminding(say: Say, text: str, every_s: float = REMIND_S) -> Iterator[None]:
    """Print `text`, and print it again with the elapsed time every `every_s` seconds until the block ends."""
    begun, has_ended = time.monotonic(), threading.Event()

    def remind() -> None:
        while not has_ended.wait(every_s):
            say(f"{text}: {clock(time.monotonic() - begun)} so far")

    say(text)
    reminder = threading.Thread(target=remind, name="remind", daemon=True)
    reminder.start()
    try:
        yield
    finally:
        has_ended.set()
        reminder.join()

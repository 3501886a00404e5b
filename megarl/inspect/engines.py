"""Show the engines of a running asynchronous job, and restart an engine that has left because it ended or
hung.

    megarl engines list runs/a      state of each engine
    megarl engines add runs/a       start the first engine that has left again

The job needs --min-engines. It starts the engine at the beginning of its next step. The engine gets the
weights at the end of this step, and prompts from then on."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.loggers.engine_states import LEFT, EngineState, read_states, request_start
from megarl.inspect.arguments import Parser


def main(argv: Sequence[str]) -> int:
    """Run `megarl engines` and return the exit code."""
    parser = Parser("engines", __doc__)
    parser.add_argument("action", choices=("list", "add"), help="show all engines, or start one again")
    parser.add_argument("run", type=Path, help="folder of the run, its --save")
    arguments = parser.parse(argv)
    try:
        states = read_states(arguments.run)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    if not states:
        raise ConfigError(
            [
                f"run ({arguments.run}): has no engines that may leave and come back. Name the --save of a job "
                "with --staleness 1 --min-engines 1 and engines in processes of their own."
            ]
        )
    if arguments.action == "list":
        sys.stdout.write(table(states))
    else:
        sys.stdout.write(f"{add(arguments.run, states)}\n")
    return 0


def table(states: Sequence[EngineState]) -> str:
    """Return the states of engines as text, a line per engine."""
    rows = [("engine", "ranks", "state", "since step", "reason")]
    for one in states:
        ranks = " ".join(map(str, one.ranks))
        rows.append((f"{one.role}.{one.engine}", ranks, one.state, str(one.step), one.reason))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def add(run: Path, states: Sequence[EngineState]) -> str:
    """Ask the job to restart the first engine that has left. Returns a sentence that announces it.

    Raises: ConfigError if no engine has left, or if no job is running."""
    left = [one for one in states if one.state == LEFT]
    if not left:
        shown = ", ".join(f"{one.role}.{one.engine} is {one.state}" for one in states)
        raise ConfigError([f"run ({run}): no engine has left: {shown}. Nothing is to be done."])
    if not _is_running(run):
        raise ConfigError(
            [f"run ({run}): no job is running there. Resume it with --load: it begins with all engines."]
        )
    request_start(run, left[0])
    return f"{left[0].role}.{left[0].engine} is started in the next step, and has weights at its end"


def _is_running(run: Path) -> bool:
    """Return whether a job holds the lock of a run folder."""
    descriptor = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # a job holds it, or the file system has no locks
        return True
    finally:
        os.close(descriptor)
    return False

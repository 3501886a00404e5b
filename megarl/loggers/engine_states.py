"""Read and write the states of a run's engines, and requests to start an engine again. Imports no torch.

engines/states.json        the driver writes it whenever a state changes
engines/add/rollout.1      a request: the driver removes it and starts engine 1 of the role"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from megarl.files.writing import writing
from megarl.loggers.json_lines import ENGINES

LIVE, LEFT, JOINING = "live", "left", "joining"
"""States: it samples; it has ended or hung; it was started again and waits for the next weights."""


class EngineState(msgspec.Struct):
    """Whether one engine of a rollout role works, since which step, and why not."""

    role: str
    """Name of the rollout role."""
    engine: int
    """Number of the engine, from 0."""
    ranks: tuple[int, ...]
    state: str = LIVE
    step: int = 0
    """Training step since which it has this state."""
    reason: str = ""
    """Why the engine has left, or could not be started."""


class EngineRequest(msgspec.Struct):
    """A request to start an engine again."""

    role: str
    engine: int


def write_states(run: Path, states: Sequence[EngineState]) -> None:
    """Write the states of all engines of a run."""
    path = run / ENGINES / "states.json"
    new = path.with_name(".states.json.new")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(msgspec.json.format(msgspec.json.encode(states)))
        new.replace(path)


def read_states(run: Path) -> list[EngineState]:
    """Return the states of all engines of a run, [] if its engines cannot leave.

    Raises: ValueError for a file that is damaged."""
    path = run / ENGINES / "states.json"
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[EngineState])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None


def request_start(run: Path, engine: EngineState) -> None:
    """Ask the running job to start an engine again."""
    path = run / ENGINES / "add" / f"{engine.role}.{engine.engine}"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def take_requests(run: Path) -> list[EngineRequest]:
    """Return and remove the requests to start an engine again."""
    taken = []
    for path in sorted((run / ENGINES / "add").glob("*.*")):
        path.unlink(missing_ok=True)
        role, _, engine = path.name.rpartition(".")
        if engine.isdecimal():
            taken.append(EngineRequest(role, int(engine)))
    return taken

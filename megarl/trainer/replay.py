"""Log what the engines of a run did at which of their steps, and read the log back for --replay.

The run folder's engines.jsonl has one record per line. A record is on the disk before the thing that it
describes takes effect, so the log is never behind the run:

    {"kind": "start", "format": 1, "settings": {"--seed": 0, "--staleness": 1}, "step": 0}
    {"kind": "admit", "engine": 0, "engine_step": 0, "version": 0, "visits": [0, 1], "step": 1}
    {"kind": "take", "visits": [1], "step": 1}
    {"kind": "commit", "engine": 0, "engine_step": 57, "version": 1, "step": 1}

`step` is the training step that is running; after a resume the records of later steps are removed, as in
metrics.jsonl. Engine steps count from 0 in each start of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from megarl.failures import ExplainedError
from megarl.files.writing import writing
from megarl.loggers.json_lines import ENGINES

FORMAT = 1


class ReplayError(ExplainedError, ValueError):
    """Raised for a log that cannot be read, and for a configuration that cannot repeat the logged run."""


class LogRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """One line of engines.jsonl."""

    step: int
    """Training step that is running."""
    suffix: str = ""
    """Suffix of the actor: "" for the first, "_2" for the second."""


class Start(LogRecord, frozen=True, tag="start"):
    """A job starts or resumes. `step` is the last completed step."""

    format: int
    settings: dict[str, Any]
    """Flag or other name -> value of everything that a replay must have in common with this job."""


class EngineRecord(LogRecord, frozen=True):
    """Base class of the records of one engine."""

    engine: int
    """Index of the engine in the actor's rollout role."""
    engine_step: int
    """Number of steps that the engine has made when the record takes effect."""


class Admit(EngineRecord, frozen=True, tag="admit"):
    """An engine receives prompts to train on, in this order."""

    version: int
    """Version of the engine's weights."""
    visits: tuple[int, ...]


class Evaluate(Admit, frozen=True, tag="evaluate"):
    """An engine receives held-out prompts. Their visits are rows of the held-out data."""

    greedy: bool = False


class Canary(Admit, frozen=True, tag="canary"):
    """An engine receives canary prompts, which compare it with the trainer."""


class Commit(EngineRecord, frozen=True, tag="commit"):
    """An engine switches to the weights of a version."""

    version: int


class Checkpoint(EngineRecord, frozen=True, tag="checkpoint"):
    """An engine's requests are saved in the checkpoint of `step`, and their KV cache is computed anew."""


class EngineLost(EngineRecord, frozen=True, tag="engine_lost"):
    """An engine has died or hangs. `engine_step` is the last one that it reported."""

    visits: tuple[int, ...]
    """Groups that go to other engines."""


class EngineJoined(EngineRecord, frozen=True, tag="engine_joined"):
    """An engine joins with the weights of a version."""

    version: int


class Take(LogRecord, frozen=True, tag="take"):
    """The training step trains on the groups of these visits."""

    visits: tuple[int, ...]


class RewardFailed(LogRecord, frozen=True, tag="reward_failed"):
    """A scoring role gives a sample no score."""

    role: str
    sample_id: int
    reason: Literal["failed", "late"] = "failed"


Record = (
    Start | Admit | Evaluate | Canary | Commit | Checkpoint | EngineLost | EngineJoined | Take | RewardFailed
)
_decode = msgspec.json.Decoder(Record).decode
_encode = msgspec.json.Encoder().encode


class ReplayLog:
    """Appends records to the engines.jsonl of a run folder.

    Args:
        folder: the run folder. When a run resumes, the records of later steps are removed before.
        step: the last completed step.
        settings: see `Start`."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        self._path = folder / ENGINES
        with writing(self._path):
            self._file = open(self._path, "ab", buffering=0)
        self.write(Start(step=step, format=FORMAT, settings=dict(settings)))

    def write(self, *records: Record) -> None:
        """Append records. They have reached the operating system when the call returns."""
        lines = memoryview(b"".join(_encode(record) + b"\n" for record in records))
        with writing(self._path):
            while lines:  # an unbuffered write may stop early
                lines = lines[self._file.write(lines) :]

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


def read_log(folder: Path) -> list[Record]:
    """Return the records of a run folder's engines.jsonl, without a last line that a killed job did not
    finish.

    Raises: ReplayError, which names file and line, if the folder has no such file, or if a line is not a
        record of this format."""
    path = folder / ENGINES
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ReplayError(
            f"{path} cannot be read ({error.strerror}): only a run with --staleness of at least 1 writes it."
        ) from error
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            record = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ReplayError(f"{path}, line {number} is not a record of format {FORMAT}: {error}.") from None
        if isinstance(record, Start) and record.format != FORMAT:
            raise ReplayError(
                f"{path}, line {number}: the log has format {record.format}, and this version of megarl reads "
                f"format {FORMAT}. Replay with the version that wrote it."
            )
        if not records and not isinstance(record, Start):
            raise ReplayError(f"{path}, line {number}: the first record must be of kind start.")
        records.append(record)
    if not records:
        raise ReplayError(f"{path} has no records: the job ended before it started its engines.")
    return records


@dataclass(frozen=True)
class ReplayPlan:
    """What a replay forces, of one actor.

    Example: engine 0 sampled visits 0 and 1 from its first step on, and had new weights after 57 steps:
        ReplayPlan(engines={0: [(0, Admit(...)), (57, Commit(...))]}, taken={1: (1,)}, failed_rewards={})
    """

    engines: Mapping[int, Sequence[tuple[int, EngineRecord]]]
    """Engine -> (engine step, record) in order. Engine steps count on when the logged run was resumed."""
    taken: Mapping[int, tuple[int, ...]]
    """Training step -> visits that it trains on; see `SampleBuffer.replayed`."""
    failed_rewards: Mapping[int, Sequence[RewardFailed]]
    """Training step -> scores that were missing in it."""

    @classmethod
    def read(cls, folder: Path, settings: Mapping[str, Any], suffix: str = "") -> Self:
        """Read the plan of one actor from the run folder of an earlier run.

        Args:
            settings: those of the replaying job; see `Start`.
        Raises: ReplayError for a log that cannot be read, and for settings that differ from those of the
            logged run."""
        engines: dict[int, list[tuple[int, EngineRecord]]] = {}
        taken: dict[int, tuple[int, ...]] = {}
        failed: dict[int, list[RewardFailed]] = {}
        before: dict[int, int] = {}  # engine -> its steps before the last resume
        for record in read_log(folder):
            if isinstance(record, Start):
                _check_settings(folder, record.settings, settings)
                before = {engine: _steps_at_checkpoint(records) for engine, records in engines.items()}
            elif record.suffix != suffix:
                continue
            elif isinstance(record, Take):
                taken[record.step] = record.visits
            elif isinstance(record, RewardFailed):
                failed.setdefault(record.step, []).append(record)
            else:
                steps = before.get(record.engine, 0) + record.engine_step
                engines.setdefault(record.engine, []).append((steps, record))
        return cls(engines, taken, failed)


def _steps_at_checkpoint(records: Sequence[tuple[int, EngineRecord]]) -> int:
    """Return how many steps an engine had made at its last checkpoint, from which a resumed job went on."""
    return next((steps for steps, record in reversed(records) if isinstance(record, Checkpoint)), 0)


def _check_settings(folder: Path, logged: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ReplayError for the first setting that differs."""
    for name, value, other in _differences(logged, msgspec.to_builtins(dict(now))):
        raise ReplayError(
            f"--replay ({folder}): {name} is {value} in that run and {other} in this job; a replay needs the same."
        )


def _differences(
    logged: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield name, logged value and present value of each setting that differs. Names of settings within a
    setting are joined by a dot."""
    for name in [*logged, *(name for name in now if name not in logged)]:
        value, other = logged.get(name, "not set"), now.get(name, "not set")
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _differences(value, other, f"{prefix}{name}.")
        elif value != other:
            yield f"{prefix}{name}", value, other

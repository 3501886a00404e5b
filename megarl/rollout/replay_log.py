"""Define the log of an asynchronous run, write it, and read it back for --replay.

The folder engines/ of a run has one file for the driver and one for each engine, with one record per line. A
record is on the disk before the thing that it describes takes effect, so the log is never behind the run:

    driver.jsonl     {"kind":"start","format":1,"settings":{"seed":"0"},"step":0}
                     {"kind":"route","visits":[0,1,2,3],"engines":[0,0,1,1],"step":1}
                     {"kind":"take","visits":[1,2],"step":1}
    rollout_0.jsonl  {"kind":"start","format":1,"step":0}
                     {"kind":"admit","engine_step":0,"version":0,"visits":[0,1],"step":1}
                     {"kind":"commit","engine_step":57,"version":1,"step":1}

`step` is the training step that is running. When a run resumes, the records of later steps are removed, as in
metrics.jsonl. Engine steps count from 0 in each start of a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from megarl.config.rules_streaming import ARGUMENTS
from megarl.failures import ExplainedError
from megarl.files.writing import writing
from megarl.loggers.json_lines import ENGINES
from megarl.rollout.replay_settings import FREE, SIZE_OF

FORMAT = 1
DRIVER = "driver"
"""Name of the driver's file. An engine's is that of its role and its number: rollout_0, rollout_2_0."""


class ReplayError(ExplainedError, ValueError):
    """Raised for a log that cannot be read, for a configuration that cannot repeat the logged run, and for a
    replay that does something else than that run."""

    read_on = "docs/debugging.md, section Repeat an asynchronous run"


class LogRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """One line of a replay log, which is a file in the folder engines/ of a run."""

    step: int
    """Training step that is running."""


class Start(LogRecord, frozen=True, kw_only=True, tag="start"):
    """A job starts or resumes. `step` is the last completed step."""

    format: int
    settings: dict[str, str] = {}
    """In the driver's file: name -> value of everything that a replay must have in common with this job."""


class EngineRecord(LogRecord, frozen=True, kw_only=True):
    """Base class of the records of one engine."""

    engine_step: int = -1
    """Number of steps that the engine has made when the record takes effect; -1 before it is known."""


class Admit(EngineRecord, frozen=True, kw_only=True, tag="admit"):
    """An engine receives prompts to train on, in this order."""

    version: int
    """Version of the engine's weights."""
    visits: tuple[int, ...]


class Evaluate(Admit, frozen=True, kw_only=True, tag="evaluate"):
    """An engine receives held-out prompts. Their visits are rows of the held-out data."""

    greedy: bool = False


class Canary(Admit, frozen=True, kw_only=True, tag="canary"):
    """An engine receives canary prompts, which compare it with the trainer."""


class Commit(EngineRecord, frozen=True, kw_only=True, tag="commit"):
    """An engine switches to the weights of a version, or its weights become that version unchanged."""

    version: int


class Checkpoint(EngineRecord, frozen=True, kw_only=True, tag="checkpoint"):
    """An engine's requests are saved in the checkpoint of `step`, and their KV cache is computed anew."""


class Turns(EngineRecord, frozen=True, kw_only=True, tag="turns"):
    """Environments or agents have replied: their episodes get a next turn, or end. `step` is the last
    completed step, so that a resume from its checkpoint, which may come later, keeps the record."""

    replies: tuple[tuple[str, dict[str, Any] | None], ...]
    """Name of the episode ("train/17", "eval/3": purpose and sample), and the fields of the reply that are
    not the default. Without them the episode begins anew, because its environment could not be brought
    back."""


class DriverRecord(LogRecord, frozen=True, kw_only=True):
    """Base class of the driver's records about one actor."""

    suffix: str = ""
    """Suffix of the actor: "" for the first, "_2" for the second."""


class Route(DriverRecord, frozen=True, kw_only=True, tag="route"):
    """The engine of each prompt that the driver gives to the engines."""

    visits: tuple[int, ...]
    engines: tuple[int, ...]


class Take(DriverRecord, frozen=True, kw_only=True, tag="take"):
    """The training step trains on the groups of these visits."""

    visits: tuple[int, ...]


class RewardFailed(LogRecord, frozen=True, kw_only=True, tag="reward_failed"):
    """A scoring role gave these samples no score."""

    role: str
    samples: tuple[int, ...]


class Save(LogRecord, frozen=True, kw_only=True, tag="save"):
    """A checkpoint of the completed step `step` begins."""


class EngineLeft(LogRecord, frozen=True, kw_only=True, tag="engine_left"):
    """An engine has ended or hangs. No replay can repeat that."""

    role: str
    engine: int
    reason: str


class EngineJoined(LogRecord, frozen=True, kw_only=True, tag="engine_joined"):
    """An engine that has left gets prompts again."""

    role: str
    engine: int


_OfEngine = Admit | Evaluate | Canary | Commit | Checkpoint | Turns
Record = Start | _OfEngine | Route | Take | RewardFailed | Save | EngineLeft | EngineJoined
_decode = msgspec.json.Decoder(Record).decode
_encode = msgspec.json.Encoder().encode


def path_of(run: Path, name: str) -> Path:
    """Return the file of the driver or of an engine in a run folder."""
    return run / ENGINES / f"{name}.jsonl"


class ReplayLog:
    """Appends records to a file in engines/ of a run folder.

    Args:
        step: the last completed step.
        settings: see `Start`."""

    def __init__(self, run: Path, name: str, step: int, settings: Mapping[str, str] | None = None) -> None:
        self._path = path_of(run, name)
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)
        self.write(Start(step=step, format=FORMAT, settings=dict(settings or {})))

    def write(self, *records: Record) -> None:
        """Append records. They have reached the operating system when the call returns."""
        lines = memoryview(b"".join(_encode(record) + b"\n" for record in records))
        with writing(self._path):
            while lines:  # an unbuffered write may stop early
                lines = lines[self._file.write(lines) :]

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


def text_of(record: LogRecord) -> str:
    """Return a record as its line in the log."""
    return _encode(record).decode()


def read_log(run: Path, name: str) -> list[Record]:
    """Return the records of a file in engines/ of a run folder, without a last line that a killed job did not
    finish.

    Raises: ReplayError, which names file and line, if the file does not exist or has no records, or if a line
        is not a record of this format."""
    path = path_of(run, name)
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


def planned_records(run: Path, name: str, completed: int) -> list[EngineRecord]:
    """Return the records of an engine that a replay repeats, with engine steps that count from the start of
    the replaying job.

    A logged run that was resumed counts as one that never stopped: its engine steps count on from the
    checkpoint that it went on from.

    Args:
        completed: the last completed step of the replaying job: 0, or that of the checkpoint it resumes from.
    Raises: ReplayError for a log that cannot be read, or that has no checkpoint of this step."""
    records: list[EngineRecord] = []
    first, base = 0, 0  # the step that the log begins after; engine steps before the last resume
    for record in read_log(run, name):
        if isinstance(record, Start):
            kept = _after_checkpoint(records, record.step)
            if kept is None:
                records, first, base = [], record.step, 0
            else:
                del records[kept:]
                base = records[-1].engine_step
        elif isinstance(record, EngineRecord):
            records.append(_moved(record, base))
    if completed == first:
        return records
    begin = _after_checkpoint(records, completed)
    if begin is None:
        raise ReplayError(
            f"--replay ({run}): this job goes on after step {completed}, and {path_of(run, name)} has no "
            f"checkpoint of that step. Replay from the step where that run began ({first})."
        )
    return [_moved(record, -records[begin - 1].engine_step) for record in records[begin:]]


def _after_checkpoint(records: list[EngineRecord], step: int) -> int | None:
    """Return the index after the last checkpoint of a step, or None if there is none."""
    found = [
        i for i, record in enumerate(records, 1) if isinstance(record, Checkpoint) and record.step == step
    ]
    return found[-1] if found else None


def _moved(record: EngineRecord, steps: int) -> EngineRecord:
    return msgspec.structs.replace(record, engine_step=record.engine_step + steps)


@dataclass
class DriverPlan:
    """The driver's decisions in the logged run, which a replay repeats.

    Example: DriverPlan(engines={("", 0): 1}, taken={("", 1): (0,)}, saved={1}, last_step=2)
    """

    engines: dict[tuple[str, int], int] = field(default_factory=dict)
    """(Suffix of the actor, visit) -> engine."""
    taken: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """(Suffix of the actor, training step) -> visits that it trains on."""
    failed: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """(Scoring role, training step) -> samples that it gave no score."""
    saved: set[int] = field(default_factory=set)
    """Steps after which there was a checkpoint."""
    last_step: int = 0
    """Last step that the run began."""

    @classmethod
    def read(cls, run: Path, settings: Mapping[str, str]) -> DriverPlan:
        """Read the plan from the folder of an earlier run.

        Args:
            settings: those of the replaying job; see `Start`.
        Raises: ReplayError for a log that cannot be read, and for settings that differ from those of the
            logged run."""
        plan = cls()
        for record in read_log(run, DRIVER):
            plan.last_step = max(plan.last_step, record.step)
            if isinstance(record, Start):
                _check_settings(run, record.settings, settings)
            elif isinstance(record, Route):
                routed = zip(record.visits, record.engines, strict=True)
                plan.engines |= {(record.suffix, visit): engine for visit, engine in routed}
            elif isinstance(record, Take):
                plan.taken[record.suffix, record.step] = record.visits
            elif isinstance(record, RewardFailed):
                plan.failed[record.role, record.step] = record.samples
            elif isinstance(record, Save):
                plan.saved.add(record.step)
            elif isinstance(record, EngineLeft):
                raise ReplayError(
                    f"--replay ({run}): cannot repeat that run, because engine {record.engine} of "
                    f"{record.role} left it in step {record.step} ({record.reason})."
                )
        return plan


def _check_settings(run: Path, logged: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise ReplayError for the first setting that differs."""
    for name, value, other in _differences(logged, now):
        raise ReplayError(
            f"{name} is {value} in that run and {other} in this job. A replay needs the same: "
            f"try @{run / ARGUMENTS} with --replay {run} and another --save."
        )


def _differences(logged: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, logged value and present value of each setting that differs.

    Sizes that the run did not log are passed over, and flags that it logged though they may differ: older
    versions logged the sizes of fewer files, and more flags."""
    shared = [name for name in logged if name not in FREE]
    added = [name for name in now if name not in logged and not name.startswith(SIZE_OF)]
    for name in [*shared, *added]:
        value, other = logged.get(name, "not set"), now.get(name, "not set")
        if value != other:
            yield name, value, other

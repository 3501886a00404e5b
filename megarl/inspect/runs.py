"""Read the records of a run folder, also while the job is still writing them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from megarl.config.args_file import numbered
from megarl.config.errors import ConfigError, try_path
from megarl.config.rules_files import RUN_FILES
from megarl.files.checkpoints import is_one_checkpoint, step_of
from megarl.loggers.base import flags_of
from megarl.loggers.json_lines import METRICS
from megarl.metrics import current_name


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run."""
    return any((folder / name).is_file() for name in RUN_FILES)


def run_folder(name: str) -> Path:
    """Return the folder of a run. Raises: ConfigError if it holds none, with a similar folder that does."""
    folder = Path(name)
    if not is_run(folder):
        reason = "holds no metrics.jsonl" if folder.is_dir() else "there is no such folder"
        advice = try_path(folder, is_run, "Give a folder that a job was told to --save.")
        raise ConfigError([f"RUN ({name}): {reason}.{advice}"])
    return folder


def read_rows(path: Path) -> Iterator[dict]:
    """Yield the JSON objects of a file, one per line. A last line without its end is left out.

    A job that runs may be writing that line, and a killed job may have left it.

    Raises: ConfigError for a line that is no JSON object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = error
            if not isinstance(row, dict):
                raise ConfigError(
                    [f"{path}:{number}: is not a JSON object ({row!r:.60}). Take the line out of a copy."]
                )
            yield row


def metrics_of(folder: Path) -> list[dict]:
    """Return the rows of metrics.jsonl by ascending step, after those of the run that this one resumed. A
    metric of an earlier version has the name that it has now.

    A run that was resumed in another folder (`--load`) begins after the steps of the first one."""
    rows = _rows_of_steps(folder)
    seen, first = {folder.resolve()}, min((step for step in rows if step > 0), default=float("inf"))
    while (found := _resumed_run(folder)) is not None and found[0].resolve() not in seen:
        folder, last = found
        seen.add(folder.resolve())
        earlier = {step: row for step, row in _rows_of_steps(folder).items() if step < first and step <= last}
        rows = {**earlier, **rows}
        first = min((step for step in earlier if step > 0), default=first)
    return [rows[step] for step in sorted(rows)]


def _rows_of_steps(folder: Path) -> dict[int, dict]:
    path = folder / METRICS
    rows = read_rows(path) if path.is_file() else ()
    return {
        row["step"]: {current_name(name): value for name, value in row.items()}
        for row in rows
        if "step" in row
    }


def _resumed_run(folder: Path) -> tuple[Path, float] | None:
    """Return the run that a run has continued (--load), and the last step of that run that counts."""
    argument = argument_of(folder, "load")
    if argument is None:
        return None
    load = Path(argument)
    run, last = (load.parent.parent, step_of(load)) if is_one_checkpoint(load) else (load, float("inf"))
    return (run, last) if is_run(run) else None


def argument_of(folder: Path, flag: str) -> str | None:
    """Return the value of a flag in a run's resolved.args; None if it has none, or several."""
    words = _words_of(folder, flag)
    return words[0] if len(words) == 1 else None


def _words_of(folder: Path, flag: str) -> list[str]:
    """Return the words of a flag in a run's resolved.args, ["true"] for a flag without words; [] without the
    flag."""
    arguments = folder / "resolved.args"
    if not arguments.is_file():
        return []
    return shlex.split(flags_of(arguments.read_text(encoding="utf-8")).get(flag, ""))


def data_files_of(folder: Path, flag: str) -> list[str]:
    """Return the files that a flag of a run's resolved.args names; [] if it names none."""
    words = _words_of(folder, flag)
    return [] if words == ["true"] else words  # data files have a suffix, so "true" is none


def actor_argument_of(folder: Path, flag: str, number: int) -> str | None:
    """Return the value of a flag for the actor with a number in a run's resolved.args; None as `argument_of`."""
    own = argument_of(folder, numbered(flag, number)) if number > 1 else None
    return argument_of(folder, flag) if own is None else own

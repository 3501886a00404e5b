"""Checkpoints of whole jobs in a run folder: where they are, and job.json, without which a folder is none.

run/checkpoints/step_000010/
  job.json            what no role has: step, data cursors, random states; and the digest of each role's manifest
  actor/, critic/     one folder per trained role, see megarl/checkpoint
run/checkpoints/.step_000012.partial/        being written, or left by a job that ended meanwhile"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megarl.config.checkpoint_json import file_digest, read_json, write_json
from megarl.config.schema import TrainConfig

CHECKPOINTS, JOB, MANIFEST = "checkpoints", "job.json", "checkpoint.json"
_FORM, VERSION = "megarl job", 1
_PARTS = {"step": int, "roles": dict, "models": dict, "actors": dict, "random_states": list, "metrics": dict}
_STEP = re.compile(r"step_(\d{6,})")


class JobFileError(ValueError):
    """A job.json that cannot be read, and why."""


def folder_of_step(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    """None: not a checkpoint by its name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints_in(run: Path) -> list[Path]:
    """Newest first, damaged ones too."""
    found = (run / CHECKPOINTS).iterdir() if (run / CHECKPOINTS).is_dir() else ()
    return sorted(
        (path for path in found if step_of(path) is not None and path.is_dir()), key=step_of, reverse=True
    )


def is_one_checkpoint(load: Path) -> bool:
    """Not a run folder."""
    return step_of(load) is not None and ((load / JOB).exists() or load.parent.name == CHECKPOINTS)


def found_by(load: str) -> list[Path]:
    """What --load names, in the order in which they are tried: one checkpoint, or all of a run."""
    folder = Path(load)
    return [folder] if is_one_checkpoint(folder) else checkpoints_in(folder)


def goes_on(config: TrainConfig) -> bool:
    """--load is the run in --save."""
    if config.checkpoint.load is None:
        return False
    load, save = Path(config.checkpoint.load).resolve(), Path(config.run.save).resolve()
    return save in (load, load.parent.parent if load.parent.name == CHECKPOINTS else None)


def write_job(folder: Path, body: Mapping[str, object]) -> None:
    """And wait until it is on the disk. body: what JSON can hold."""
    write_json(folder / JOB, _FORM, VERSION, body)


def read_job(folder: Path) -> dict[str, object]:
    """Raises: JobFileError naming the file and what is wrong, also with the manifests of its roles."""
    path = folder / JOB
    try:
        body = read_json(path, _FORM, VERSION, JobFileError)
    except FileNotFoundError:
        raise JobFileError(f"{folder} is not a checkpoint of a job: it has no {JOB}.") from None
    for name, kind in _PARTS.items():
        if not isinstance(body.get(name), kind):
            raise JobFileError(f"{path} is not of a megarl job: it has no {name}.")
    for role, digest in body["roles"].items():
        manifest = folder / role / MANIFEST
        if not manifest.is_file():
            raise JobFileError(f"{manifest} is missing.")
        if file_digest(manifest) != digest:
            raise JobFileError(f"{manifest} is damaged: its SHA-256 is not the one that was written.")
    return body

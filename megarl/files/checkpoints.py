"""Checkpoints of complete jobs in a run folder: their paths and their JSON files.

    run/checkpoints/step_000010/
      job.json            data of no single role: step, data cursors, random states, digests of the manifests
      actor/, critic/     one folder per trained role, see megarl/checkpoint
      requests/           samples that no step has trained on, finished or not (--staleness)
    run/checkpoints/.step_000012.attempt_1.partial/    being written, or left by a job that ended meanwhile

Every JSON file holds its format, a version and a digest of the rest. The module imports no torch, because
`megarl check` reads the files too."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.files.writing import MISSING, reading, writing

CHECKPOINTS, JOB, MANIFEST = "checkpoints", "job.json", "checkpoint.json"
REQUESTS = "requests"
"""Folder in a checkpoint, and the entry of job.json with the digests of its files."""
_FORM, VERSION = "megarl job", 1
_PARTS = {"step": int, "roles": dict, "models": dict, "actors": dict, "random_states": list, "metrics": dict}
_STEP = re.compile(r"step_(\d{6,})")


class JobFileError(ValueError):
    """Error of a job.json that cannot be read. The text gives the reason."""


def write_json(path: Path, form: str, version: int, body: Mapping[str, object]) -> None:
    """Write a JSON file with its digest, and wait until it is on the disk.

    Args:
        body: data that JSON can hold, without NaN.
    Raises: WriteError."""
    with writing(path), open(path, "w", encoding="utf-8") as file:
        head = {"format": form, "version": version, "sha256": _digest(body)}
        json.dump(head | dict(body), file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path, form: str, version: int, error: type[ValueError]) -> dict[str, object]:
    """Return the content of a JSON file that `write_json` wrote, after comparing its digest.

    Raises: FileNotFoundError; `error` naming the file and the problem; ReadError, which is no damage."""
    try:
        with reading(path):
            text = path.read_bytes()
        stored = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise
    except (*MISSING, ValueError, RecursionError) as reason:
        raise error(f"{path} cannot be read: {reason}.") from reason
    if not isinstance(stored, dict) or stored.get("format") != form:
        raise error(f"{path} is not of a {form}.")
    if stored.get("version") != version:
        raise error(f"{path} has version {stored.get('version')} of the format; this megarl reads {version}.")
    body = {key: value for key, value in stored.items() if key not in ("format", "version", "sha256")}
    if stored.get("sha256") != _digest(body):
        raise error(f"{path} is damaged: its digest does not fit its content.")
    return body


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Call fsync on a folder, so that files created or renamed in it survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_of_step(run: Path, step: int) -> Path:
    """Return the path of the folder with the checkpoint of a step."""
    return run / CHECKPOINTS / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint by its folder's name; None if the name is not a checkpoint's."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints_in(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, newest first, damaged ones too."""
    found = (run / CHECKPOINTS).iterdir() if (run / CHECKPOINTS).is_dir() else ()
    found = [path for path in found if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def is_one_checkpoint(load: Path) -> bool:
    """Return whether --load names one checkpoint, and not a run folder."""
    return step_of(load) is not None and ((load / JOB).exists() or load.parent.name == CHECKPOINTS)


def run_of_model(folder: Path) -> Path | None:
    """Return the run folder that a path means or lies in: the run itself, its hf/ or hf_2/, its checkpoints;
    None for other folders. The run has a resolved.args."""
    candidates = [folder]
    if folder.name == "hf" or folder.name.startswith("hf_"):
        candidates.append(folder.parent)
    if is_one_checkpoint(folder):
        candidates.append(folder.parent.parent)
    elif is_one_checkpoint(folder.parent):
        candidates.append(folder.parent.parent.parent)
    return next((one for one in candidates if (one / "resolved.args").is_file()), None)


def found_by(load: str) -> list[Path]:
    """Return the folders of the checkpoints to try for --load, in order: the one that it names, or all of the
    run, newest first."""
    folder = Path(load)
    return [folder] if is_one_checkpoint(folder) else checkpoints_in(folder)


def write_job(folder: Path, body: Mapping[str, object]) -> None:
    """Write job.json, and wait until it is on the disk. `body` is data that JSON can hold."""
    write_json(folder / JOB, _FORM, VERSION, body)


def read_job(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's job.json, after comparing the digests of the roles' manifests.

    Raises: JobFileError naming the file and the problem, also for the manifests; ReadError for a file that
        cannot be read, which is no damage."""
    path = folder / JOB
    try:
        body = read_json(path, _FORM, VERSION, JobFileError)
    except FileNotFoundError:
        raise JobFileError(f"{folder} is not a checkpoint of a job: it has no {JOB}.") from None
    for name, kind in _PARTS.items():
        if not isinstance(body.get(name), kind):
            raise JobFileError(f"{path} is not of a megarl job: it has no {name}.")
    digests = {folder / role / MANIFEST: digest for role, digest in body["roles"].items()}
    digests |= {folder / REQUESTS / name: digest for name, digest in body.get(REQUESTS, {}).items()}
    for path, digest in digests.items():
        with reading(path):
            found = file_digest(path) if path.is_file() else None
        if found is None:
            raise JobFileError(f"{path} is missing.")
        if found != digest:
            raise JobFileError(f"{path} is damaged: its SHA-256 is not the one that was written.")
    return body

"""The JSON files of checkpoints: each holds its format, a version and a digest of the rest. And what else a
checkpoint needs of files.

No torch: `megarl check` reads them too."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from megarl.config.writing import writing


def write_json(path: Path, form: str, version: int, body: Mapping[str, object]) -> None:
    """Write a file and wait until it is on the disk. body: what JSON can hold, without NaN. Raises:
    WriteError."""
    with writing(path), open(path, "w", encoding="utf-8") as file:
        json.dump(
            {"format": form, "version": version, "sha256": _digest(body), **body}, file, allow_nan=False
        )
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path, form: str, version: int, error: type[ValueError]) -> dict[str, object]:
    """Raises: FileNotFoundError; `error` naming the file and what is wrong with it."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as reason:
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
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Wait until the names of its files are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

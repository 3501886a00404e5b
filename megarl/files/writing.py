"""Raise errors of reading and writing that name the file and give advice. Imports no torch.

The operating system's own error of a full disk, for example, names no file."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from megarl.failures import ExplainedError

_ROOM = "Free space there, or name another folder"
_ADVICE = {
    errno.ENOSPC: f"{_ROOM}; fewer checkpoints are kept with --keep",
    errno.EDQUOT: f"{_ROOM}; fewer checkpoints are kept with --keep",
    errno.EFBIG: "Raise the limit of the size of a file (ulimit -f unlimited)",
    errno.EROFS: "Name a folder on another file system",
    errno.EACCES: "Give this user the right to write there, or name another folder",
    errno.EPERM: "Give this user the right to write there, or name another folder",
}


class _FileError(ExplainedError, OSError):
    """Error of the file system with one file. `errno` and `filename` are those of the cause."""

    def __init__(self, path: str | os.PathLike, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror or str(cause), str(path))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.filename, OSError(self.errno, self.strerror))


class WriteError(_FileError):
    """Error of a file that cannot be written."""

    read_on = "docs/debugging.md, section Read a failure"

    def __str__(self) -> str:
        advice = _ADVICE.get(self.errno)
        return f"{self.filename} cannot be written: {self.strerror}.{f' {advice}.' if advice else ''}"


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Context manager that raises WriteError in place of any OSError while a file is opened, written and
    closed."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error) from error


MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of a path at which there is no file. Any other OSError says nothing about the file's content."""


class ReadError(_FileError):
    """Error of a file that is there and cannot be read now, so that its content may well be whole."""

    read_on = "docs/checkpoints.md, section Damage"

    def __str__(self) -> str:
        return (
            f"{self.filename} cannot be read: {self.strerror}. That is no damage, so no other file is taken "
            "in its place. Give this user the right to read it, or try again when the file system answers."
        )


@contextlib.contextmanager
def reading(path: str | os.PathLike) -> Iterator[None]:
    """Context manager that raises ReadError in place of any OSError but those of a missing file."""
    try:
        yield
    except MISSING:
        raise
    except OSError as error:
        raise ReadError(path, error) from error


def obstacle(folder: str | os.PathLike) -> str | None:
    """Return why a folder cannot be created or written, or None. The check creates nothing.

    Permission bits alone are not enough: root ignores them, and a file system may be read-only or hold no
    files at all (/proc). The check therefore opens an unnamed temporary file in the nearest existing folder,
    if the file system supports such files."""
    try:
        return _obstacle(Path(folder).absolute())
    except OSError as error:  # this user may not enter a folder on the path
        return f"{error.filename or folder}: {error.strerror}"


def _obstacle(path: Path) -> str | None:
    for there in (path, *path.parents):
        if there.is_symlink() and not there.exists():
            return f"{there} is a link to {os.readlink(there)}, which does not exist"
        if there.exists():
            break
    if not there.is_dir():
        return f"{there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        return (
            f"{there} is on a read-only file system" if read_only else f"this user may not write in {there}"
        )
    try:
        os.close(os.open(there, os.O_TMPFILE | os.O_WRONLY, 0o600))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            return f"in {there} no file can be created: {error.strerror}"
        if os.statvfs(there).f_blocks == 0:
            return f"{there} is on a file system without room for files"
    return None

"""Sign the messages between driver and ranks with HMAC-SHA256, so that they read only each other's messages.

The signature is checked before any of the message is read. Anybody who can reach the port of the job's store
can write there. The key is the job's secret:

    started by megarl               drawn by the process that starts the ranks, in their environment
    torchrun, one node              drawn by rank 0, in a file that only this user can read, removed
                                    when all ranks have read it
    torchrun, several nodes         the user's, in MEGARL_JOB_SECRET, the same on all nodes

The signature also covers the name of a message, such as its key in the store or the number of a command, so a
message cannot replace another one."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from megarl.failures import ExplainedError
from megarl.runtime.key_value_store import KeyValueStore

JOB_SECRET = "MEGARL_JOB_SECRET"
_MAC_BYTES, _SECRET_BYTES, _SHORTEST_SECRET = hashlib.sha256().digest_size, 32, 32
_FILE, _READERS = "secret/file", "secret/readers"
_LEFT_OVER_S = 3600.0


class ForgedMessage(ExplainedError, RuntimeError):
    """Raised for a message that no process of this job has signed."""

    read_on = "docs/security.md"


class SecretError(ValueError):
    """Raised if the job's secret is missing, too short, or in a folder that others can read. The user must
    fix it."""


def sign(data: bytes, name: str) -> bytes:
    """Return the message of this name: 32 bytes of HMAC over name and data, then the data."""
    return _mac(name, data) + data


def verify(signed: bytes | memoryview, name: str) -> memoryview:
    """Return the data of a signed message. Raises ForgedMessage if name and data were not signed with the
    job's secret.

    Raises: ForgedMessage if no process with the same secret has signed the data for this name."""
    data = memoryview(signed)[_MAC_BYTES:]
    if not hmac.compare_digest(_mac(name, data), signed[:_MAC_BYTES]):
        raise ForgedMessage(
            f"{name} is not signed with the job's secret and was not read: another process wrote it, or "
            f"{JOB_SECRET} is not the same on all nodes."
        )
    return data


def _mac(name: str, data: bytes | memoryview) -> bytes:
    mac = hmac.new(job_secret().encode(), name.encode() + b"\0", hashlib.sha256)
    mac.update(data)
    return mac.digest()


HOW = f"Try export {JOB_SECRET}=$(openssl rand -hex {_SECRET_BYTES}) once, and give every node the value."
_secret: str | None = None


def job_secret() -> str:
    """Return the secret by which this process signs messages: from the environment, or drawn once at random.

    Raises: SecretError for a secret that is short enough to be guessed."""
    global _secret
    if _secret is None:
        given = os.environ.get(JOB_SECRET)
        if given is not None and len(given) < _SHORTEST_SECRET:
            raise SecretError(
                f"{JOB_SECRET} (variable, {len(given)} characters): must have at least "
                f"{_SHORTEST_SECRET} characters. {HOW}"
            )
        _secret = given or secrets.token_hex(_SECRET_BYTES)
    return _secret


def check_secret(env: Mapping[str, str] = os.environ) -> None:
    """Raise SecretError if this rank's secret is too short, or if it is missing and required.

    A secret is required where the ranks cannot agree on one by themselves."""
    job_secret()
    alone = env["WORLD_SIZE"] == "1"
    on_one_node = (
        env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"] and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    if JOB_SECRET not in env and not alone and not on_one_node:
        raise SecretError(
            f"{JOB_SECRET} (variable, not set): must be set unless torchrun starts all ranks, on one node: "
            f"it signs commands in a store that others can reach. {HOW}"
        )


def agree(store: KeyValueStore, env: MutableMapping[str, str] = os.environ) -> None:
    """Give all ranks the same secret before the first message, and remove it from the environment. Collective
    over the world.

    The secret is the one in the environment, else rank 0's. It is removed from the environment, which
    children inherit.

    Args:
        store: the store where the ranks of this attempt meet.
    Raises: SecretError like check_secret."""
    global _secret
    check_secret(env)
    if env.pop(JOB_SECRET, None) is not None or env["WORLD_SIZE"] == "1":
        return
    if env["RANK"] == "0":
        store.set(_FILE, _write(job_secret()).name)
        return
    path = _folder() / os.path.basename(
        store.get(_FILE).decode()
    )  # only the name: a writer to the store cannot choose another folder
    _secret = _read(path)
    if store.add(_READERS, 1) == int(env["WORLD_SIZE"]) - 1:
        path.unlink(missing_ok=True)


def _write(secret: str) -> Path:
    """Write the secret to a new file that only this user can read, and return its path.

    Files of jobs that ended before all of their ranks had started are removed after an hour: a process that
    cannot be seen may run in another container with the same temporary folder."""
    folder = _folder()
    for path in folder.glob("secret-*"):
        has_ended = not Path(f"/proc/{path.name.split('-')[1]}").exists()
        with contextlib.suppress(FileNotFoundError):  # another job has removed it
            if has_ended and time.time() - path.stat().st_mtime > _LEFT_OVER_S:
                path.unlink()
    handle, name = tempfile.mkstemp(prefix=f"secret-{os.getpid()}-", dir=folder)  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(secret)
    return Path(name)


def _read(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        return file.read()


def _folder() -> Path:
    """Return a temporary folder that nobody else can read or write, and create it if needed.

    Raises: SecretError if somebody else has made the folder."""
    folder = Path(tempfile.gettempdir()) / f"megarl-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SecretError(
            f"{folder} (folder for secrets): must be a folder of this user that nobody else may open. Try "
            f"TMPDIR=$HOME, or a {JOB_SECRET} of your own."
        )
    return folder

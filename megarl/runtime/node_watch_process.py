"""Hold the connection of one node to the driver's NodeWatch, and end the node's ranks if it is cut.

    python -m megarl.runtime.node_watch_process ADDRESS PID FIRST_RANK NUM_RANKS IDLE_S INTERVAL_S PROBES

    a rank of the node ends   tell the driver, again once the rank's own message had time to arrive, and end
    the driver ends           kill ranks that are stopped; its end ends the others
    the driver is not reached end the ranks of this node and the process that started them

Imports no torch and waits in the kernel, so it costs some 15 MB and no time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megarl.runtime import signing
from megarl.runtime.process_tree import agent_of, children_of_all, descendants, rank_of
from megarl.runtime.keep_alive import KeepAlive, is_cut
from megarl.runtime.node_watch import (
    ACCEPTED,
    CHALLENGE_BYTES,
    LAST_WORDS_S,
    RANK_ENDED,
    RANK_ENDS,
    challenge_name,
    read_bytes,
)

_CONNECTED_S, _AGENT_S, _STOPPED_S = 60.0, 3.0, 1.0


def main(address: str, rank_pid: int, ranks: range, keep_alive: KeepAlive) -> int:
    """Watch until the rank or the driver ends, or the driver is not reached. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its rank, not before
    try:
        own, agent_pid = os.pidfd_open(rank_pid), agent_of(rank_pid)
    except OSError:  # it ended while this process started
        with contextlib.suppress(OSError):
            _tell_end(_connect(address, ranks, keep_alive), ranks[0])
        return 0
    try:
        connection = _connect(address, ranks, keep_alive)
        found = _ranks_of(agent_pid)
        number_of = {own: ranks[0]} | _other_ranks(found, ranks[0])
        gone = [rank for rank in ranks if rank not in number_of.values()]
        if gone and ranks[0] in found.values():  # otherwise the variables of processes cannot be read here
            _tell_end(connection, gone[0])
            return 0
        ready, _, _ = select.select([connection.fileno(), *number_of], [], [])
        if connection.fileno() not in ready:
            # The last: torchrun ends the first rank because another one has ended.
            _tell_end(connection, number_of[ready[-1]])
            return 0
        read_bytes(connection, 1)  # raises if the driver is not reached
        _kill_stopped([*{rank_pid, *_ranks_of(agent_pid)}])
        return 0
    except OSError as error:
        if not is_cut(error):
            _kill_stopped([*{rank_pid, *_ranks_of(agent_pid)}])
            return 0
        sys.stderr.write(
            f"[node {socket.gethostname()}] does not reach the driver ({address}) for {keep_alive.limit_s} s "
            f"({error.strerror}): the link is cut, or the driver's machine is down. Its ranks "
            f"{', '.join(map(str, ranks))} are ended, so that they write nothing beside a later attempt.\n"
        )
        sys.stderr.flush()
        _end_node(agent_pid)
        return 1


def _tell_end(connection: socket.socket, rank: int) -> None:
    """Tell the driver that a rank has ended, once what the rank has said itself must have arrived."""
    connection.sendall(RANK_ENDS % rank)
    time.sleep(LAST_WORDS_S)
    connection.sendall(RANK_ENDED % rank)


def _connect(address: str, ranks: range, keep_alive: KeepAlive) -> socket.socket:
    """Return a connection to the driver that is signed in. Raises OSError."""
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=_CONNECTED_S)
    keep_alive.apply(connection)
    challenge = b""
    while len(challenge) < CHALLENGE_BYTES:
        challenge += _read(connection, CHALLENGE_BYTES - len(challenge))
    body = json.dumps({"node": socket.gethostname(), "ranks": [*ranks]}).encode()
    connection.sendall(signing.sign(body, challenge_name(challenge)).hex().encode() + b"\n")
    if _read(connection, 1) != ACCEPTED:
        raise ConnectionAbortedError("the driver's answer is not one")
    connection.settimeout(None)
    return connection


def _read(connection: socket.socket, size: int) -> bytes:
    if data := read_bytes(connection, size):
        return data
    raise ConnectionAbortedError("the driver has ended")


def _other_ranks(number_of: Mapping[int, int], but: int) -> dict[int, int]:
    """Return pidfd -> number, for ranks given as process id -> number, without the number `but` and those
    that have ended."""
    found = {}
    for pid, number in number_of.items():
        with contextlib.suppress(OSError):  # it has ended
            if number != but:
                found[os.pidfd_open(pid)] = number
    return found


def _end_node(agent: int) -> None:
    """Kill the ranks that an agent has started, directly or through other programs, then end the agent:
    torchrun's, or the actor of the node."""
    for pid in _processes_of_ranks(agent):
        _kill_group(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(agent, signal.SIGTERM)
    deadline = time.monotonic() + _AGENT_S
    while time.monotonic() < deadline and _exists(agent):
        time.sleep(0.1)
    for pid in _processes_of_ranks(agent):  # started meanwhile
        _kill_group(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(agent, signal.SIGKILL)


def _kill_stopped(pids: Sequence[int]) -> None:
    """Wait for the end of ranks whose driver has ended, and kill those that are stopped (SIGSTOP): they do not
    hear of it, and torchrun would wait half a minute for them."""
    while alive := [pid for pid in pids if _exists(pid)]:
        stopped = [pid for pid in alive if _state(pid) == "T"]
        time.sleep(_STOPPED_S)
        for pid in stopped:
            if _state(pid) == "T":
                _kill_group(pid)


def _ranks_of(agent: int) -> dict[int, int]:
    """Return process id -> number, for the ranks of this job that an agent has started."""
    run_id, children = os.environ.get("TORCHELASTIC_RUN_ID", ""), children_of_all().get(agent, [])
    return {pid: number for pid in children if (number := rank_of(pid, run_id)) is not None}


def _processes_of_ranks(agent: int) -> list[int]:
    """Return the ids of the processes under an agent that have a rank's number, parents first, without this
    one."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return [pid for pid in descendants(agent) if pid != os.getpid() and rank_of(pid, run_id) is not None]


def _exists(pid: int) -> bool:
    return _state(pid) not in ("", "Z", "X")


def _state(pid: int) -> str:
    """Return the letter that proc(5) has for the state of a process, "" if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _kill_group(pid: int) -> None:
    """Kill a rank and what it has started in its process group, if the group is its own."""
    end: Callable[[int, int], None] = os.kill
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            end = os.killpg
        end(pid, signal.SIGKILL)


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    pid, first, count, *limits = map(int, numbers)
    signing.job_secret()
    sys.exit(main(where, pid, range(first, first + count), KeepAlive(*limits)))

"""The driver of the jobs in test_torchrun.py: one function per scenario. What it saw goes to FOLDER/seen.json."""

import hashlib
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

from megarl.driver.executor import Executor, RemoteError
from megarl.driver.torchrun import run_driver

CALL_TIMEOUT_S, LATE_S = 60.0, 2.0
RANKS = {"actor": [0, 1], "left": [0], "right": [1]}


def left_after(pids: list, seconds: float) -> list:
    """Those still running when the time is over; a failure may take that long to end everything, and torchrun restarts sooner."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def is_running(pid: int) -> bool:
    """Not so for a zombie, which has ended and waits for whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def conversation(executor: Executor, role: str) -> list:
    """What any executor must answer alike: values, keywords, no shared objects, the first error, nothing after it."""
    handle, items = executor.role(role), [1, 2]
    seen = [handle.echo(1, "two", key=[3.0]).first(), handle.append(items).first(), items]
    try:
        executor.call("nobody", "echo")
    except ValueError as error:
        seen.append("role ('nobody')" in str(error))
    try:
        handle._private
    except AttributeError:
        seen.append("private")
    executor.step = 3
    try:
        executor.call(role, "update", bad_rank=executor.ranks[role][-1]).result()
    except RemoteError as error:
        seen += [error.role, error.method, error.step, error.error, "in update" in error.remote_traceback]
        seen.append(str(error).splitlines()[0].replace(f"rank {error.rank}", "rank R"))
    try:
        handle.echo().result()
    except RemoteError as error:
        seen.append(["again", error.method])
    return seen


def healthy(executor, folder: Path) -> None:
    actor, left, right = executor.role("actor"), executor.role("left"), executor.role("right")
    seen = {"pids": actor.setup().result(), "driver": os.getpid(), "prefix": os.environ["MEGARL_STORE_PREFIX"]}
    seen["env"] = sorted(n for n in os.environ if n.startswith(("TORCHELASTIC_", "MASTER_")) or n in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    for i in range(120):  # unread futures: order must come from the log, not from waiting
        (actor, left, right)[i % 3].note(i)
    seen["notes"] = actor.read_notes().result()

    slept = left.sleep(0.4), right.sleep(0.4)
    (l0, l1), (r0, r1) = slept[0].first(), slept[1].first()
    seen["overlap_s"] = min(l1, r1) - max(l0, r0)
    first, second = left.sleep(0.3), actor.sleep(0.0)
    seen["still_running"] = first.done()
    seen["gap_s"] = second.result()[0][0] - first.first()[1]
    seen["seconds"] = first.seconds
    seen["calls"] = {f"{role}.{method}": seconds for (role, method), seconds in executor.take_seconds().items()}
    seen["taken"] = len(executor.take_seconds())
    seen["mean"] = actor.mean(1.0).result()

    data = os.urandom(10 << 20)
    doubled = actor.double(data).result()
    seen["large"] = [len(d) == 20 << 20 and hashlib.sha256(d).digest() == hashlib.sha256(data + data).digest() for d in doubled]
    num_keys = executor._outbox._store.num_keys()
    times = []
    for _ in range(300):
        start = time.perf_counter()
        actor.echo().result()
        times.append(time.perf_counter() - start)
    seen["round_trip_ms"] = statistics.median(times) * 1e3
    seen["new_keys"] = executor._outbox._store.num_keys() - num_keys
    (folder / "seen.json").write_text(json.dumps(seen))


def fails(executor, folder: Path) -> None:
    executor.call("actor", "setup").result()
    (folder / "seen.json").write_text(json.dumps(conversation(executor, "actor")))
    executor.call("actor", "echo")  # raises the same failure: what ends the job


def chain(executor, folder: Path) -> None:
    """One attempt after another: an exception, three kills, a deadline, an exception while roles are built; and then, past all that
    they left in the store, a healthy run."""
    attempt = int(os.environ["MEGARL_STORE_PREFIX"].rsplit("_", 1)[1])
    pids = executor.call("actor", "setup").result()
    earlier = [int(p) for f in folder.glob("pids_*") for p in f.read_text().split()]
    (folder / f"left_over_{attempt}").write_text(" ".join(map(str, left_after(earlier, seconds=10.0))))
    (folder / f"pids_{attempt}").write_text(" ".join(map(str, [*pids, os.getpid()])))
    executor.step = 10 + attempt
    if attempt == 0:
        executor.call("actor", "update", bad_rank=1).result()
    elif attempt == 4:
        late(executor, folder)
    elif attempt == 6:
        healthy(executor, folder)
    else:
        victim = [pids[1], pids[0], os.getpid()][attempt - 1]
        sleeping = executor.call("left" if attempt == 1 else "right", "sleep", 60.0)
        mark_time(folder)
        os.kill(victim, signal.SIGKILL)
        sleeping.result()


def late(executor, folder: Path) -> None:
    """Rank 1 hangs in one call; the driver waits for a later one, which rank 0 answers."""
    right, actor = executor.role("right"), executor.role("actor")
    executor._timeout_s = LATE_S  # only now: how long the workers take to start says nothing here
    right.sleep(60.0)
    mark_time(folder)
    actor.sleep(0.0).result()


def mark_time(folder: Path) -> None:
    attempt = os.environ["MEGARL_STORE_PREFIX"].rsplit("_", 1)[1]
    (folder / f"failed_at_{attempt}").write_text(str(time.time()))


def refuses(executor, folder: Path) -> None:
    """The user's mistake, found before the first call."""
    raise ValueError("train_iters (0) must be at least 1.")


def waits(executor, folder: Path) -> None:
    """Everything is busy until someone outside ends it."""
    executor.step = 2
    executor.call("actor", "setup").result()
    future = executor.call("actor", "sleep", 60.0)
    (folder / "ready").touch()
    future.result()


if __name__ == "__main__":
    scenario, folder = globals()[sys.argv[1]], Path(sys.argv[2])
    sys.exit(run_driver(lambda executor: scenario(executor, folder), RANKS, CALL_TIMEOUT_S))

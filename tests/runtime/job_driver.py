"""The driver of the jobs in test_torchrun.py and test_launch.py: one function per scenario. What it saw goes
to FOLDER/seen.json.

`python -m job_driver SCENARIO FOLDER` starts its ranks itself; beside a rank 0 that torchrun started, it
finds them."""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from handles import Handle

from megarl.runtime.end_message import EndNotes
from megarl.runtime.shutdown import Stopped, graceful_shutdown, run_job_in_process, run_job
from megarl.runtime.executor import Executor, RemoteError
from megarl.runtime.inline_executor import InlineExecutor
from megarl.runtime.local_ranks import LocalRanks
from megarl.trainer.executors import rank_description
from megarl.trainer.scheduler import Scheduler
from megarl.trainer.stop_request import StopRequest, StopRequested
from megarl.runtime.torchrun import run_driver
from megarl.flow import Flow, Node
from megarl.runtime.abort import ABORT

sys.executable = os.environ.get("RANKS_PYTHON", sys.executable)
"""Path of the Python that runs the ranks of the job."""
CALL_TIMEOUT_S, LATE_S = 60.0, 2.0
RANKS = {"actor": [0, 1], "left": [0], "right": [1]}


def left_after(pids: list, seconds: float) -> list:
    """Those still running when the time is over; a failure may take that long to end everything, and torchrun
    restarts sooner."""
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
    """What any executor must answer alike: values, keywords, no shared objects, the first error, nothing
    after it."""
    handle, items = Handle(executor, role), [1, 2]
    seen = [handle.echo(1, "two", key=[3.0]).first(), handle.append(items).first(), items]
    try:
        executor.call("nobody", "echo")
    except ValueError as error:
        seen.append("role ('nobody')" in str(error))
    executor.label = "step 3"
    try:
        executor.call(role, "update", bad_rank=executor.ranks[role][-1]).result()
    except RemoteError as error:
        seen += [error.role, error.method, error.label, error.error, "in update" in error.remote_traceback]
        seen.append(str(error).splitlines()[0].replace(f"rank {error.rank}", "rank R"))
    try:
        handle.echo().result()
    except RemoteError as error:
        seen.append(["again", error.method])
    return seen


def healthy(executor, folder: Path) -> None:
    actor, left, right = Handle(executor, "actor"), Handle(executor, "left"), Handle(executor, "right")
    seen = {
        "pids": actor.setup().result(),
        "driver": os.getpid(),
        "prefix": os.environ["MEGARL_STORE_PREFIX"],
    }
    seen["env"] = sorted(
        n
        for n in os.environ
        if n.startswith(("TORCHELASTIC_", "MASTER_")) or n in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
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
    seen["calls"] = {
        f"{role}.{method}": seconds for (role, method), seconds in executor.take_seconds().items()
    }
    seen["taken"] = len(executor.take_seconds())
    seen["mean"] = actor.mean(1.0).result()

    data = os.urandom(10 << 20)
    doubled = actor.double(data).result()
    seen["large"] = [
        len(d) == 20 << 20 and hashlib.sha256(d).digest() == hashlib.sha256(data + data).digest()
        for d in doubled
    ]
    num_keys = executor._mailbox._store.num_keys()
    for _ in range(300):
        actor.echo().result()
    seen["new_keys"] = executor._mailbox._store.num_keys() - num_keys
    (folder / "seen.json").write_text(json.dumps(seen))


def fails(executor, folder: Path) -> None:
    executor.call("actor", "setup").result()
    (folder / "seen.json").write_text(json.dumps(conversation(executor, "actor")))
    executor.call("actor", "echo")  # raises the same failure: what ends the job


def chain(executor, folder: Path) -> None:
    """One attempt after another: an exception, three kills, a deadline, an exception while roles are built;
    and then, past all that they left in the store, a healthy run."""
    attempt = int(os.environ["MEGARL_STORE_PREFIX"].rsplit("_", 1)[1])
    pids = executor.call("actor", "setup").result()
    earlier = [int(p) for f in folder.glob("pids_*") for p in f.read_text().split()]
    (folder / f"left_over_{attempt}").write_text(" ".join(map(str, left_after(earlier, seconds=10.0))))
    (folder / f"pids_{attempt}").write_text(" ".join(map(str, [*pids, os.getpid()])))
    executor.label = f"step {10 + attempt}"
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
    right, actor = Handle(executor, "right"), Handle(executor, "actor")
    executor.call_timeout_s = LATE_S  # only now: how long the workers take to start says nothing here
    right.sleep(60.0)
    mark_time(folder)
    actor.sleep(0.0).result()


def mark_time(folder: Path) -> None:
    attempt = os.environ["MEGARL_STORE_PREFIX"].rsplit("_", 1)[1]
    (folder / f"failed_at_{attempt}").write_text(str(time.time()))


def refuses(executor, folder: Path) -> None:
    """The user's mistake, found before the first call."""
    raise ValueError("train_iters (0) must be at least 1.")


class FlowHost:
    """Arguments by node name; nothing to move."""

    driver_columns = ("value",)

    def __init__(self, arguments: dict[str, tuple], skipped: tuple[str, ...] = ()):
        self.by_node, self.skipped = arguments, skipped

    def skips(self, node) -> bool:
        return node.name in self.skipped

    def arguments(self, node, results) -> tuple[tuple, dict]:
        return self.by_node.get(node.name, ()), {}

    def end_of(self, node, call):
        return call

    def move(self, columns, source_role, node) -> None:
        return None

    def finished(self, node, values) -> None:
        pass


def flow_of(*calls: str) -> Flow:
    """ "right.sleep: a > b" is a node that reads a and writes b."""
    nodes = []
    for call in calls:
        name, columns = call.split(":")
        reads, writes = ([c.strip() for c in part.split(",") if c.strip()] for part in columns.split(">"))
        role, method, *own_name = name.split(".")
        nodes.append(
            Node(
                role=role,
                method=method,
                reads=reads,
                writes=writes,
                name=f"{role}.{own_name[0]}" if own_name else "",
            )
        )
    return Flow(nodes)


def flows(executor, folder: Path) -> None:
    """What the scheduler does with real ranks; then a node of a flow fails."""
    executor.call("actor", "setup").result()
    meshes = {role: SimpleNamespace(ranks=tuple(ranks)) for role, ranks in RANKS.items()}
    seen = {}

    def ran(flow: Flow, host: FlowHost) -> tuple[Scheduler, dict]:
        scheduler = Scheduler(executor, meshes, host)
        results = scheduler.run(flow)
        for result in results.values():
            if not result.node.background:
                result.result()
        return scheduler, results

    one_second = {"left.sleep": (1.0,), "right.sleep": (1.0,)}
    scheduler, _ = ran(flow_of("left.sleep:>", "right.sleep:>"), FlowHost(one_second))
    left, right = (
        next(r for r in scheduler.timeline.records if r.name == name)
        for name in ("left.sleep", "right.sleep")
    )
    seen["overlap_s"] = min(left.ended, right.ended) - max(left.started, right.started)

    flow = flow_of(
        "left.sleep:>", "right.sleep.first:>value", "actor.sleep:value>", "right.sleep.second:value>"
    )
    lengths = {"left.sleep": (0.4,), "right.first": (0.1,), "right.second": (0.1,), "actor.sleep": (0.1,)}
    scheduler, _ = ran(flow, FlowHost(lengths))
    records = sorted(scheduler.timeline.records, key=lambda record: record.started)
    seen["order"] = {rank: [record.name for record in records if rank in record.ranks] for rank in (0, 1)}

    flow = flow_of("left.echo:>a", "left.note:a>", "right.sleep:a>")
    flow = Flow(replace(node, background=node.role == "right") for node in flow.nodes)
    scheduler, results = ran(flow, FlowHost({"left.note": (1,), "right.sleep": (1.0,)}))
    seen["background_node_ended_after_the_run"] = not results["right.sleep"].done()
    scheduler.close()
    seen["and_before_close_returned"] = results["right.sleep"].done()

    flow = flow_of("left.echo:>a", "right.echo:a>b", "actor.echo:b>")
    _, results = ran(flow, FlowHost({}, skipped=("right.echo",)))
    seen["skipped"] = [node.name for node in flow.nodes if node.name not in results]
    seen["subset"] = executor.call_on([1], "actor", "echo", "only rank 1").result()

    (folder / "seen.json").write_text(json.dumps(seen))
    executor.label = "step 7"
    ran(flow_of("left.echo:>a", "actor.update:a>"), FlowHost({"actor.update": (1,)}))


def dies(executor, folder: Path) -> None:
    executor.label = "step 2"
    executor.call("actor", "setup").result()
    executor.call("actor", "die", bad_rank=1).result()


def waits(executor, folder: Path) -> None:
    """Everything is busy until someone outside ends it."""
    executor.label = "step 2"
    pids = executor.call("actor", "setup").result()
    (folder / "pids").write_text(" ".join(map(str, pids)))
    future = executor.call("actor", "sleep", 60.0)
    (folder / "ready").touch()
    future.result()


def waits_noted(executor, folder: Path) -> None:
    """As `waits`, with advice at the end of the driver's message."""
    waits(executor, folder)


class InlineRole:
    """Of job_worker.Role what works in one process."""

    def setup(self):
        return os.getpid()

    def echo(self, *args, **kwargs):
        return [args, kwargs]

    def generate(self, seconds: float):
        for _ in range(int(seconds / 0.02)):
            ABORT.check()
            time.sleep(0.02)


def inline_stops(executor, folder: Path) -> None:
    (folder / "ready").touch()  # before the call, which only then returns when it is left
    InOrder(executor, folder).run(("left", "generate", 60.0))


def inline_waits(executor, folder: Path) -> None:
    executor.label = "step 2"
    (folder / "ready").touch()
    executor.call("actor", "generate", 60.0)


def main(scenario: str, folder: str) -> int:
    def job(executor: Executor) -> None:
        globals()[scenario](executor, Path(folder))

    if "MEGARL_STORE" in os.environ:
        return run_driver(job, RANKS, CALL_TIMEOUT_S)
    if scenario.startswith("inline"):
        return run_job_in_process(
            job, lambda: contextlib.nullcontext(InlineExecutor({"actor": InlineRole(), "left": InlineRole()}))
        )
    processes = LocalRanks([scenario, folder], 2, "job_worker", rank_description(RANKS))
    notes = EndNotes(how_to_resume="a step had begun: {}".format) if scenario == "waits_noted" else EndNotes()
    return run_job(job, lambda: processes.start(RANKS, CALL_TIMEOUT_S), processes, notes)


class InOrder:
    """A loop that stops in order, and saves by an echo."""

    def __init__(self, executor, folder: Path, grace_s: float = 20.0):
        self.executor, self.folder, self.grace_s, self.stop = executor, folder, grace_s, StopRequest()
        executor.check_interrupt = self.stop.check

    def run(self, *calls: tuple) -> None:
        executor = self.executor
        if executor.label is None:
            pids = executor.call("actor", "setup").result()
            (self.folder / "pids").write_text(" ".join(map(str, pids)))
        executor.label, self.stop.is_armed = "step 3", True
        with graceful_shutdown(self.stop, self.grace_s, (self.folder / "records").touch):
            try:
                futures = [executor.call(*call) for call in calls]
                (self.folder / "ready").touch()
                for future in futures:
                    future.result()
            except StopRequested:
                with self.stop.held():
                    executor.abort_calls()
                    (self.folder / "saved").write_text(str(executor.call("actor", "echo").result()))
                raise Stopped(signal.SIGTERM, "[driver] stopped in order") from None


def stops(executor, folder: Path) -> None:
    InOrder(executor, folder).run(("left", "generate", 60.0), ("right", "sleep", 2.0))


def stops_with_children(executor, folder: Path) -> None:
    InOrder(executor, folder).run(("left", "generate", 60.0), ("right", "use_child", 60.0))


def stops_after_update(executor, folder: Path) -> None:
    """The step is finished: nothing is raised before the next one."""
    order = InOrder(executor, folder)
    order.stop.begin_update()
    order.run(("actor", "update", -1), ("right", "sleep", 3.0), ("left", "note", 1))
    (folder / "finished").touch()
    order.stop.step_completed()
    order.run(("left", "note", 2))


def stops_too_slowly(executor, folder: Path) -> None:
    InOrder(executor, folder, grace_s=2.0).run(("right", "sleep", 60.0))


def dies_in_order(executor, folder: Path) -> None:
    """Nothing that rank 0 does has to do with the death of rank 1: torchrun tells it."""
    InOrder(executor, folder).run(("left", "sleep", 60.0))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""A loop of one's own, without models: `python -m local_job SCENARIO FOLDER`. The same file is the ranks,
which hold one role, actor."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from handles import Handle

sys.executable = os.environ.get("RANKS_PYTHON", sys.executable)
"""Path of the Python that runs the ranks of the job."""


def rank_main(scenario: str, folder: str) -> int:
    import torch.distributed as dist

    from megarl.runtime.mailbox import connect, world_store
    from megarl.runtime.process import DRIVER_PID, end_on_signals, end_with_parent
    from megarl.runtime.worker_loop import serve

    end_on_signals()
    end_with_parent(int(os.environ[DRIVER_PID]))
    rank = int(os.environ["RANK"])
    if scenario == "cannot_start" and rank == 1:
        return 3
    dist.init_process_group(
        "gloo", store=world_store(30.0), rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    return serve({"actor": Role(rank)}, rank, connect(timeout_s=30))


class Role:
    def __init__(self, rank: int):
        self.rank = rank

    def whoami(self):
        return [self.rank, os.getpid(), os.getsid(0)]

    def mean(self, value: float):
        import torch
        import torch.distributed as dist

        total = torch.tensor([value * (self.rank + 1)])
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def listening(self):
        """(address, port) of every socket of this process that takes connections."""
        return listening()

    def sleep(self, seconds: float):
        time.sleep(seconds)

    def update(self, bad_rank: int):
        if self.rank == bad_rank:
            raise ValueError("learning rate (-1) must be positive")
        return self.mean(1.0)

    def leave(self, bad_rank: int):
        """As native code may, or a user's function: with the exit code of success, and without a word."""
        if self.rank == bad_rank:
            os._exit(0)
        return self.mean(1.0)

    def die(self, bad_rank: int):
        """While the other rank waits for it in a collective."""
        if self.rank == bad_rank:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.mean(1.0)


def ranks_of(scenario: str, folder: str):
    from megarl.runtime.local_ranks import LocalRanks, started

    processes = LocalRanks([scenario, folder], 2, "local_job", lambda rank: f"{rank}: actor")
    return started(processes, {"actor": [0, 1]}, 60.0)


def everything(folder: str) -> None:
    """One job after another in one process. seen.json: scenario -> what the loop saw, seconds that the end
    took, ranks still there."""
    seen = {}
    for scenario in ("talks", "fails", "raises", "rank_killed", "rank_left", "cannot_start"):
        pids, told, ended = [], "nothing", 0.0
        try:
            with ranks_of(scenario, folder) as executor:
                actor = Handle(executor, "actor")
                executor.label = "step 7"
                try:
                    if scenario != "cannot_start":
                        pids = [pid for _, pid, _ in actor.whoami().result()]
                    told = SCENARIOS[scenario](actor)
                finally:
                    ended = time.monotonic()
        except Exception as error:
            told = [type(error).__name__, str(error)]
        seen[scenario] = {
            "told": told,
            "end_s": time.monotonic() - ended,
            "left": [pid for pid in pids if Path(f"/proc/{pid}").exists()],
        }
    (Path(folder) / "seen.json").write_text(json.dumps(seen))


def talks(actor) -> list:
    return [
        actor.mean(1.0).result(),
        sorted(rank for rank, pid, session in actor.whoami().result() if session == pid),
    ]


def fails(actor) -> None:
    actor.update(bad_rank=1).result()


def raises(actor) -> None:
    actor.sleep(60.0)
    raise KeyError("the loop's own mistake")


def rank_killed(actor) -> None:
    actor.die(bad_rank=1).result()


def rank_left(actor) -> None:
    actor.leave(bad_rank=1).result()


def cannot_start(actor) -> None:
    actor.mean(1.0).result()


SCENARIOS = {f.__name__: f for f in (talks, fails, raises, rank_killed, rank_left, cannot_start)}


def listening() -> list[tuple[str, int]]:
    sockets = set()
    for handle in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{handle}"))
        except OSError:  # of the listing itself
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                address, port = local.split(":")
                found.append(
                    (
                        socket.inet_ntoa(bytes.fromhex(address)[::-1]) if table == "tcp" else address,
                        int(port, 16),
                    )
                )
    return found


def attacked(folder: str) -> None:
    """Wait while someone else talks to the driver: the ranks are idle, the driver listens. Then go on."""
    with ranks_of("waits", folder) as executor:
        actor = Handle(executor, "actor")
        actor.mean(1.0).result()
        sockets = [*listening(), *(found for rank in actor.listening().result() for found in rank)]
        seen = {"listening": sockets, "address": executor._tree.address}
        (Path(folder) / "ready.part").write_text(json.dumps(seen))
        (Path(folder) / "ready.part").rename(Path(folder) / "ready")
        while not (Path(folder) / "attacked").exists():
            time.sleep(0.05)
        (Path(folder) / "seen.json").write_text(json.dumps(actor.mean(1.0).result()))


def waits(folder: str) -> None:
    """In a call that takes long, until someone outside ends it."""
    with ranks_of("waits", folder) as executor:
        executor.call("actor", "whoami").result()
        (Path(folder) / "ready").touch()
        executor.call("actor", "sleep", 60.0).result()


def goes_on(folder: str) -> None:
    """After a Ctrl-C; a rank takes a second to end, and by then there is another."""
    from megarl.runtime.local_ranks import LocalRanks

    end_ranks = LocalRanks._end_ranks
    LocalRanks._end_ranks = lambda self: ((Path(folder) / "ending").touch(), time.sleep(1.0), end_ranks(self))
    pids = []
    with contextlib.suppress(KeyboardInterrupt), ranks_of("waits", folder) as executor:
        pids = [pid for _, pid, _ in executor.call("actor", "whoami").result()]
        (Path(folder) / "ready").touch()
        executor.call("actor", "sleep", 60.0).result()
    (Path(folder) / "left").write_text(str([pid for pid in pids if Path(f"/proc/{pid}").exists()]))


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(rank_main(*sys.argv[1:]))
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job inherits an ignored SIGINT
    {"everything": everything, "waits": waits, "attacked": attacked, "goes_on": goes_on}[sys.argv[1]](
        sys.argv[2]
    )

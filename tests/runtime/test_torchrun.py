"""The runtime with real processes: torchrun, two ranks, a driver. `pytest --import-mode=importlib
tests/runtime/test_torchrun.py`

Each launch costs seconds (four processes import torch), so cases share them: `chain` fails in six ways, one
per elastic attempt, and then must run.
"""

import sys
import time

import pytest

from tests.launch import run
from tests.runtime.jobs import END_WITHIN_S, START_WITHIN_S, TORCHRUN, preloaded


def check_healthy(seen: dict, world_is: str) -> None:
    assert seen["env"] == []  # the driver must not take itself for a rank
    assert seen["prefix"].endswith(world_is)
    roles = ("actor", "left", "right")
    issued = [[roles[i % 3], i] for i in range(120)]
    assert seen["notes"][0] == [n for n in issued if n[0] != "right"]
    assert seen["notes"][1] == [n for n in issued if n[0] != "left"]
    assert (
        seen["overlap_s"] > 0.2
    )  # two sleeps of 0.4 s on disjoint ranks; one after the other they do not overlap at all
    assert not seen["still_running"]  # done() of a 0.3 s sleep, asked at once
    assert seen["gap_s"] >= 0  # actor.sleep on rank 0 began after left.sleep there had ended
    assert seen["seconds"] >= 0.3
    assert seen["calls"]["left.sleep"] >= 0.7 and seen["calls"]["right.sleep"] >= 0.4 and seen["taken"] == 0
    assert seen["mean"] == [1.5, 1.5]
    assert seen["large"] == [True, True]
    assert (
        seen["new_keys"] <= 2
    )  # 300 calls leave at most the last command (deleted after its answer was handed over)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_every_failure_ends_its_attempt_and_the_next_one_starts_clean(job):
    torchrun = job.start([*TORCHRUN, "--max-restarts", "6", "-m", "job_worker", "chain", str(job.folder)])
    code = torchrun.wait(280)
    stderr = job.stderr()
    assert code == 0, stderr
    assert (
        "[actor rank 1] update failed at step 10: ValueError: learning rate (-1) must be positive\n" in stderr
    )
    stopped = "[driver] stopped by SIGTERM (a worker died, or torchrun was told to stop) "
    assert f"{stopped}at step 11, waiting for left.sleep on rank 0\n" in stderr
    assert (
        "[driver] stopped by SIGTERM (rank 0 has died) at step 12, waiting for right.sleep on rank 1\n"
        in stderr
    )
    assert "[rank 0] the driver process was killed by signal 9; ending the job\n" in stderr
    assert "[right] sleep timed out at step 14: no answer from rank 1 within call_timeout_s (2 s)." in stderr
    busy = stderr.split("[rank 1] was here:\n")[1]  # the call that hangs, and only that
    assert "in sleep\n    time.sleep(seconds)" in busy and "worker_loop.py" not in busy.split("\n[")[0]
    assert "[rank 0] was here:\n" in stderr
    assert "[worker rank 1] start-up failed: ValueError: num_layers (0) must be at least 1.\n" in stderr
    assert (
        sum(
            line.startswith(("[actor", "[driver", "[rank", "[right", "[worker"))
            for line in stderr.splitlines()
        )
        == 6 + 2
    )  # failures, and two stacks of the one that hung
    assert stderr.count("Traceback") == 2  # of the two exceptions; peers of a failed rank keep quiet
    for attempt in range(1, 7):
        assert attempt == 5 or job.read(f"left_over_{attempt}") == ""
        deadline_s = 2.0 if attempt == 5 else 0.0  # attempt 4 fails when its call's time is over
        end_s = (
            float(job.read(f"start_0_{attempt}")) - float(job.read(f"failed_at_{attempt - 1}")) - deadline_s
        )
        assert 0 < end_s < END_WITHIN_S, f"attempt {attempt - 1} ended {end_s:.1f} s after its failure"
    check_healthy(job.seen(), world_is="/attempt_6")
    job.wait_until_gone(5)


INTERRUPTED_TWICE = """
import os, signal, sys
from megarl.runtime import shutdown
where = sys.argv[1]
signal.signal(signal.SIGINT, shutdown._stop), signal.signal(signal.SIGTERM, shutdown._stop)
class Signals(list):
    def append(self, signum):
        super().append(signum)
        if signum == signal.SIGINT and where == "first": signal.raise_signal(signal.SIGTERM)
class Limits:
    def put(self, limit):
        if where == "last": signal.raise_signal(signal.SIGTERM)
shutdown._signals, shutdown._running.limits, shutdown._running.rank_0 = Signals(), Limits(), os.getppid()
try:
    signal.raise_signal(signal.SIGINT)
except shutdown.Stopped as stopped:
    print(stopped.signal.name, len(shutdown._signals))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["first", "last"])
def test_the_death_of_rank_0_does_not_hide_the_ctrl_c_that_killed_it(where):
    """Rank 0 has died of the same Ctrl-C, which is a SIGTERM here: while the handler is at work, in its first
    or its last statement."""
    done = run("-P", "-c", INTERRUPTED_TWICE, where, timeout=50)
    assert (done.stdout, done.stderr) == ("SIGINT 2\n", "")


@pytest.mark.timeout(120)
def test_no_orphans_when_torchrun_itself_is_killed(job):
    torchrun = job.start([*TORCHRUN, "-m", "job_worker", "waits", str(job.folder)])
    job.wait_for("ready")
    start = time.time()
    torchrun.kill()
    torchrun.wait(5)
    assert job.wait_until_gone(END_WITHIN_S) - start < END_WITHIN_S
    assert "at step 2, waiting for actor.sleep on rank 0, 1" in job.stderr()


@pytest.mark.timeout(120)
def test_without_torchrun_rank_0_hosts_the_store(job):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "MEGARL_JOB_SECRET": "s" * 32}
    command = preloaded([sys.executable, "-P", "-m", "job_worker", "healthy", str(job.folder)])
    ranks = [job.start(command, RANK=str(rank), **env) for rank in range(2)]
    assert [rank.wait(START_WITHIN_S + 30) for rank in ranks] == [0, 0], job.stderr()
    check_healthy(job.seen(), world_is="/none/attempt_0")
    assert job.stderr() == ""
    job.wait_until_gone(5)


@pytest.mark.parametrize(
    "launcher, first, second, told",
    [
        ("torchrun", "SIGTERM", "SIGINT", "SIGINT"),
        ("torchrun", "SIGINT", "SIGTERM", "SIGINT"),
        ("torchrun", "SIGTERM", "SIGTERM", "SIGTERM"),
        ("own", "SIGTERM", "SIGINT", "SIGTERM"),
        ("own", "SIGINT", "SIGTERM", "SIGINT"),
        ("own", "SIGINT", "SIGINT", "SIGINT"),
    ],
)
def test_a_ctrl_c_is_told_as_one_whichever_signal_comes_first(launcher, first, second, told):
    """Under torchrun Ctrl-C reaches the driver as SIGINT and, by rank 0's death, as SIGTERM, in either order.
    Elsewhere the first decides."""
    code = (
        "import os, signal, threading, time\n"
        "from megarl.runtime import shutdown\n"
        f"first, second = signal.{first}, signal.{second}\n"
        f"if {launcher == 'torchrun'}: shutdown._running.rank_0 = os.getppid()\n"
        "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, shutdown._stop)\n"
        "def send():\n"
        "    time.sleep(0.05); os.kill(os.getpid(), first)\n"
        # two that come at once are one, or come in the order of their numbers
        "    while not shutdown._signals: time.sleep(0.001)\n"
        "    os.kill(os.getpid(), second)\n"
        "threading.Thread(target=send).start()\n"
        "try: time.sleep(20)\n"
        "except shutdown.Stopped as stopped: print(stopped.signal.name)\n"
        "while len(shutdown._signals) < 2: time.sleep(0.01)\n"
    )
    done = run("-P", "-c", code, timeout=30)
    assert (done.stdout, done.stderr) == (f"{told}\n", "")

"""SIGTERM, by whom and when: real processes, no models. `pytest --import-mode=importlib
tests/runtime/test_shutdown.py`

tests/e2e/test_stopping.py has the same with a job that trains."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import preloaded_python
from tests.runtime.jobs import DRIVER, END_WITHIN_S, TORCHRUN, Job


def started(job: Job, scenario: str, command: list[str] = DRIVER, **env: str):
    process = job.start([*command, scenario, str(job.folder)], **env)
    job.wait_for("ready")
    time.sleep(0.3)  # until the calls have begun
    return process


@pytest.mark.timeout(120)
def test_calls_are_left_or_waited_for_and_then_the_rest_is_done(job):
    """To every process of the job, as Slurm sends it."""
    process = started(job, "stops")
    for pid in job.alive():
        os.kill(pid, signal.SIGTERM)
    assert process.wait(END_WITHIN_S) == 143, job.stderr()
    assert job.stderr() == "[driver] stopped in order\n"
    assert job.read("saved") == "[[[], {}], [[], {}]]"
    job.wait_until_gone(END_WITHIN_S)


@pytest.mark.timeout(120)
def test_what_the_signal_ends_first_is_no_failure(job):
    """Rank 1's call raises, as its child has died, before the signal reaches a rank or the driver."""
    process = started(job, "stops_with_children")
    ranks = [int(pid) for pid in job.read("pids").split()]
    (child,) = set(job.alive()) - {process.pid, *ranks}
    for pid in (child, ranks[1], ranks[0], process.pid):
        with contextlib.suppress(ProcessLookupError):  # on a busy machine it has ended with the one before
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.03)
    assert process.wait(END_WITHIN_S) == 143, job.stderr()
    assert job.stderr() == "[driver] stopped in order\n"
    job.wait_until_gone(END_WITHIN_S)


STOPPED, INTERRUPTED = (
    "[driver] stopped in order\n",
    "[driver] interrupted at step 2, waiting for actor.sleep on rank 0, 1\n",
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "scenario, first, code, told",
    [
        ("stops", signal.SIGTERM, 143, STOPPED),
        ("stops", signal.SIGHUP, 143, STOPPED),
        ("waits", signal.SIGHUP, 129, INTERRUPTED.replace("interrupted", "stopped by SIGHUP")),
        ("waits", signal.SIGINT, 130, INTERRUPTED),
        ("waits_noted", signal.SIGINT, 130, f"{INTERRUPTED}a step had begun: True\n"),
        ("inline_stops", signal.SIGTERM, 143, STOPPED),
        ("inline_waits", signal.SIGINT, 130, "[driver] interrupted at step 2\n"),
    ],
    ids=[
        "sigterm",
        "sighup",
        "sighup_at_once",
        "ctrl_c",
        "ctrl_c_with_advice",
        "sigterm_inline",
        "ctrl_c_inline",
    ],
)
def test_from_the_first_signal_to_the_exit_more_of_them_change_nothing(job, scenario, first, code, told):
    """The driver gets one after the other, also while it unwinds and while its interpreter shuts down. After
    a Ctrl-C of both kinds; while a job stops in order a Ctrl-C would end it at once. No signal is sent to the
    ranks, which are therefore forked from a process that has imported torch."""
    process = started(job, scenario, RANKS_PYTHON=preloaded_python())
    others = (signal.SIGTERM, signal.SIGHUP) if first != signal.SIGINT else (signal.SIGINT, signal.SIGTERM)
    process.send_signal(first)
    wait_until_taken(process)
    while not ended(process):
        for signum in others:
            os.kill(process.pid, signum)
            time.sleep(0.001)
    assert process.wait() == code, job.stderr()
    assert job.stderr() == told
    assert "stops" not in scenario or job.read("saved")
    job.wait_until_gone(END_WITHIN_S)


def wait_until_taken(process) -> None:
    """Until no signal is pending: of two that are, the kernel may give the second to another thread, which
    then is faster."""
    pending = re.compile(r"^(?:SigPnd|ShdPnd):\t0*[1-9a-f]", re.MULTILINE)
    while any(map(pending.search, thread_states(process.pid))):
        time.sleep(0.001)
    time.sleep(0.1)  # from the kernel's hands to Python's, on a machine that is busy with others


def thread_states(pid: int) -> Iterator[str]:
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            yield status.read_text()


def ended(process) -> bool:
    """Without reaping it: its process id stays its own."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@pytest.mark.timeout(120)
def test_a_rank_that_the_signal_reaches_as_it_starts_is_no_failure(job):
    """It has nothing to answer with yet, and dies of it before the driver hears of it."""
    process = job.start([*DRIVER, "stops", str(job.folder)])
    while not (
        ranks := [pid for pid in job.alive() if b"job_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    ):
        assert not ended(process), job.stderr()
        time.sleep(0.01)
    os.kill(ranks[0], signal.SIGTERM)
    assert process.wait(END_WITHIN_S) == 143, job.stderr()
    assert job.stderr().startswith("[driver] stopped by SIGTERM ") and job.stderr().count("\n") == 1
    job.wait_until_gone(END_WITHIN_S)


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_ctrl_c_that_ends_a_rank_first_is_no_failure(job):
    """As of a scheduler that sends SIGINT to every process: a rank dies of it at once."""
    process = started(job, "waits")
    os.kill(int(job.read("pids").split()[1]), signal.SIGINT)
    assert process.wait(END_WITHIN_S) == 130, job.stderr()
    assert job.stderr() == INTERRUPTED
    job.wait_until_gone(END_WITHIN_S)


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_under_torchrun_too(job):
    """torchrun sends the signal on to all: rank 0 with the driver, rank 1 with what it has started."""
    process = started(job, "stops_with_children", [*TORCHRUN, "-m", "job_worker"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_WITHIN_S + 10) != 0
    job.wait_until_gone(END_WITHIN_S)  # torchrun may be gone before the driver is
    assert "[driver] stopped in order\n" in job.stderr()
    assert job.read("saved") == "[[[], {}], [[], {}]]"


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_under_torchrun_a_death_is_no_request(job):
    """Rank 0 and the driver get the same SIGTERM as above."""
    process = started(job, "dies_in_order", [*TORCHRUN, "-m", "job_worker"])
    start = time.time()
    os.kill(int(job.read("pids").split()[1]), signal.SIGKILL)
    assert job.wait_until_gone(END_WITHIN_S + 5) - start < END_WITHIN_S
    assert process.wait(5) == 1
    assert (
        "[driver] stopped by SIGTERM at step 3, waiting for left.sleep on rank 0, with no sign of "
        "life from rank 1\n" in job.stderr()
    )
    assert not (job.folder / "saved").exists()


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_step_that_has_updated_is_finished(job):
    process = started(job, "stops_after_update")
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_WITHIN_S + 5) == 143, job.stderr()
    assert (
        job.stderr() == "[driver] stopped in order\n"
        and (job.folder / "finished").exists()
        and (job.folder / "saved").exists()
    )
    job.wait_until_gone(END_WITHIN_S)


@pytest.mark.nightly
@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", [DRIVER, [*TORCHRUN, "-m", "job_worker"]], ids=["own", "torchrun"])
def test_the_grace_time_is_a_limit(job, command):
    process = started(job, "stops_too_slowly", command)
    start = time.time()
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_WITHIN_S) == (143 if command is DRIVER else 1)
    told = (
        "[driver] stopped by SIGTERM at step 3, waiting for right.sleep on rank 1, as "
        "--exit-grace-s (2) is over\n"
    )
    assert told in job.stderr() and (job.stderr() == told or command is not DRIVER)
    assert (job.folder / "records").exists()  # another thread writes them, as the loop does not return
    assert 2.0 < job.wait_until_gone(END_WITHIN_S) - start < 2.0 + END_WITHIN_S


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_ctrl_c_ends_a_job_that_stops_in_order_at_once(job):
    process = started(job, "stops_after_update")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    start = time.time()
    process.send_signal(signal.SIGINT)
    assert process.wait(END_WITHIN_S) == 130
    assert job.wait_until_gone(END_WITHIN_S) - start < END_WITHIN_S
    assert (
        job.stderr() == "[driver] interrupted at step 3, waiting for right.sleep on rank 1\n"
        and not (job.folder / "saved").exists()
    )


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_rank_that_hangs_does_not_hold_up_the_end(job):
    """Stopped by SIGSTOP it does not answer."""
    process = started(job, "stops")
    os.kill(int(job.read("pids").split()[1]), signal.SIGSTOP)
    start = time.time()
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_WITHIN_S) == 1
    assert job.wait_until_gone(END_WITHIN_S) - start < END_WITHIN_S
    assert "with no sign of life from rank 1\n" in job.stderr()

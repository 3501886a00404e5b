"""Ranks that the user's own process starts: real processes and collectives, no models. `pytest
tests/runtime/test_local_ranks.py`

However the loop ends, all ranks end within seconds; and the loop sees why."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megarl.runtime.rank_processes import group_runs
from tests.launch import preloaded_python
from tests.runtime.jobs import END_WITHIN_S

COMMAND = [sys.executable, "-P", "-m", "local_job"]


@pytest.mark.timeout(200)
@pytest.mark.nightly
def test_one_job_after_another_in_one_process(job):
    process = job.start([*COMMAND, "everything", str(job.folder)])
    assert process.wait(180) == 0, job.stderr()
    seen = job.seen()
    assert seen["talks"]["told"] == [[1.5, 1.5], [0, 1]]  # and each rank is in a session of its own
    kind, text = seen["fails"]["told"]
    assert kind == "RemoteError"
    assert text.startswith(
        "[actor rank 1] update failed at step 7: ValueError: learning rate (-1) must be positive\nTraceback"
    )
    assert seen["raises"]["told"] == ["KeyError", '"the loop\'s own mistake"']
    assert seen["rank_killed"]["told"] == [
        "RankDied",
        "[rank 1: actor] was killed by SIGKILL. If nobody did that, the machine was out of memory "
        "(see dmesg). "
        "The job was at step 7, waiting for actor.die on rank 0, 1.",
    ]
    kind, text = seen["rank_left"]["told"]
    assert kind == "RankDied" and text.startswith("[rank 1: actor] ended with exit code 0; stderr may say")
    kind, text = seen["cannot_start"]["told"]
    assert kind == "RankDied" and text.startswith(
        "[rank 1: actor] ended with exit code 3; stderr may say why. The job was "
    )
    assert all(job["left"] == [] and job["end_s"] < END_WITHIN_S for job in seen.values()), seen
    assert job.stderr() == ""
    job.wait_until_gone(5)


@pytest.mark.timeout(120)
def test_ctrl_c_is_a_keyboard_interrupt_and_no_rank_outlives_it(job):
    process = job.start([*COMMAND, "waits", str(job.folder)], RANKS_PYTHON=preloaded_python())
    job.wait_for("ready")
    time.sleep(0.5)  # until it waits
    start = time.time()
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    assert (
        process.wait(END_WITHIN_S) == -signal.SIGINT
    )  # Python's own answer to an uncaught KeyboardInterrupt
    assert job.wait_until_gone(END_WITHIN_S) - start < END_WITHIN_S
    assert job.stderr().rstrip().endswith("KeyboardInterrupt")


@pytest.mark.timeout(120)
def test_more_ctrl_cs_do_not_keep_the_ranks_from_being_ended(job):
    """A program that goes on after the first one, as a notebook does: a second one would interrupt what ends
    the ranks."""
    process = job.start([*COMMAND, "goes_on", str(job.folder)])
    job.wait_for("ready")
    ranks = set(job.alive()) - {process.pid}
    process.send_signal(signal.SIGINT)
    job.wait_for("ending")
    process.send_signal(signal.SIGINT)
    assert process.wait(END_WITHIN_S) == 0, job.stderr()
    assert len(ranks) == 2 and job.read("left") == "[]" and job.stderr() == ""


@pytest.mark.timeout(120)
def test_no_rank_outlives_a_loop_that_is_killed(job):
    process = job.start([*COMMAND, "waits", str(job.folder)])
    job.wait_for("ready")
    process.kill()
    process.wait(5)
    job.wait_until_gone(END_WITHIN_S)


def test_a_process_that_has_ended_and_was_not_asked_for_its_exit_code_does_not_run():
    ended = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    os.killpg(ended.pid, 0)  # raises nothing: the kernel still knows the group
    assert not group_runs(ended.pid)
    ended.wait()
    assert not group_runs(ended.pid)
    running = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert group_runs(running.pid)
    finally:
        running.kill()
        running.wait()

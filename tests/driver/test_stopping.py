"""SIGTERM, by whom and when: real processes, no models. `pytest --import-mode=importlib tests/driver/test_stopping.py`

tests/e2e/test_stopping.py has the same with a job that trains."""

import os
import signal
import time

import pytest

from tests.driver.jobs import DRIVER, END_WITHIN_S, TORCHRUN, Job


def started(job: Job, scenario: str, command: list[str] = DRIVER):
    process = job.start([*command, scenario, str(job.folder)])
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
    assert job.read("saved") == "[[(), {}], [(), {}]]"
    job.wait_until_gone(END_WITHIN_S)


@pytest.mark.timeout(120)
def test_what_the_signal_ends_first_is_no_failure(job):
    """Rank 1's call raises, as its child has died, before the signal reaches a rank or the driver."""
    process = started(job, "stops_with_children")
    ranks = [int(pid) for pid in job.read("pids").split()]
    (child,) = set(job.alive()) - {process.pid, *ranks}
    for pid in (child, ranks[1], ranks[0], process.pid):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.03)
    assert process.wait(END_WITHIN_S) == 143, job.stderr()
    assert job.stderr() == "[driver] stopped in order\n"
    job.wait_until_gone(END_WITHIN_S)


@pytest.mark.slow
@pytest.mark.tail
@pytest.mark.timeout(120)
def test_under_torchrun_too(job):
    """torchrun sends the signal on to all: rank 0 with the driver, rank 1 with what it has started."""
    process = started(job, "stops_with_children", [*TORCHRUN, "-m", "job_worker"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_WITHIN_S + 10) != 0
    job.wait_until_gone(END_WITHIN_S)  # torchrun may be gone before the driver is
    assert "[driver] stopped in order\n" in job.stderr()
    assert job.read("saved") == "[[(), {}], [(), {}]]"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_under_torchrun_a_death_is_no_request(job):
    """Rank 0 and the driver get the same SIGTERM as above."""
    process = started(job, "dies_in_order", [*TORCHRUN, "-m", "job_worker"])
    start = time.time()
    os.kill(int(job.read("pids").split()[1]), signal.SIGKILL)
    assert job.wait_until_gone(END_WITHIN_S + 5) - start < END_WITHIN_S
    assert process.wait(5) == 1
    assert (
        "[driver] stopped by SIGTERM at step 3, waiting for left.sleep on rank 0, with no sign of life from rank 1\n"
        in job.stderr()
    )
    assert not (job.folder / "saved").exists()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", [DRIVER, [*TORCHRUN, "-m", "job_worker"]], ids=["own", "torchrun"])
def test_the_grace_time_is_a_limit(job, command):
    process = started(job, "stops_too_slowly", command)
    start = time.time()
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_WITHIN_S) == (143 if command is DRIVER else 1)
    told = "[driver] stopped by SIGTERM at step 3, waiting for right.sleep on rank 1, as --exit-grace-s (2) is over; nothing is saved\n"
    assert told in job.stderr() and (job.stderr() == told or command is not DRIVER)
    assert 2.0 < job.wait_until_gone(END_WITHIN_S) - start < 2.0 + END_WITHIN_S


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_job_at_once(job, second):
    process = started(job, "stops_after_update")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    start = time.time()
    process.send_signal(second)
    assert process.wait(END_WITHIN_S) == 128 + second
    assert job.wait_until_gone(END_WITHIN_S) - start < 5.0
    assert len(job.stderr().splitlines()) == 1 and "waiting for right.sleep on rank 1" in job.stderr()


@pytest.mark.slow
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

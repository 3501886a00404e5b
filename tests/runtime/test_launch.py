"""The runtime as `megarl train` has it: a driver that starts its two ranks. `pytest --import-mode=importlib
tests/runtime/test_launch.py`"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launch import preloaded_python
from tests.runtime.jobs import DRIVER, END_WITHIN_S, START_WITHIN_S, preloaded

HERE = Path(__file__).parent
LAUNCH_RANKS = (
    "import sys; from megarl.trainer.launch import launch_ranks; sys.exit(launch_ranks([], 2, 'dying'))"
)


@pytest.mark.timeout(120)
def test_a_failure_is_one_message_and_the_executors_agree(job, monkeypatch):
    """Under our own launcher nothing but the one message is printed. The driver had the same conversation as
    with inline, below."""
    launcher = job.start([*preloaded(DRIVER), "fails", str(job.folder)])
    assert launcher.wait(START_WITHIN_S) == 1, job.stderr()
    end_s = job.wait_until_gone(END_WITHIN_S) - float(job.read("failed_at_0"))
    assert end_s < END_WITHIN_S
    lines = job.stderr().splitlines()
    assert (
        lines[0] == "[actor rank 1] update failed at step 3: ValueError: learning rate (-1) must be positive"
    )
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: learning rate (-1) must be positive"
    assert any(line.endswith("in update") for line in lines) and len(lines) <= 6, job.stderr()

    from megarl.runtime.inline_executor import InlineExecutor

    monkeypatch.syspath_prepend(HERE)
    job_driver = load("job_driver")
    assert job.seen() == job_driver.conversation(InlineExecutor({"actor": LoneRole()}), "actor")


class LoneRole:
    """job_worker.Role without a world."""

    def echo(self, *args, **kwargs):
        return [list(args), kwargs]

    def append(self, items):
        items.append("seen")
        return items

    def update(self, bad_rank):
        raise ValueError(f"learning rate ({-1}) must be positive")


def load(name: str):
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(120)
def test_ctrl_c_ends_everything_quietly(job):
    launcher = job.start([*DRIVER, "waits", str(job.folder)])
    job.wait_for("ready")
    start = time.time()
    os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does
    assert launcher.wait(END_WITHIN_S) == 130
    assert job.wait_until_gone(END_WITHIN_S) - start < 10.0  # what is promised; 2 s on a free machine
    assert job.stderr() == "[driver] interrupted at step 2, waiting for actor.sleep on rank 0, 1\n"


@pytest.mark.timeout(60)
def test_the_launcher_names_a_rank_that_was_killed(job):
    """No torch and no driver in these ranks: rank 1 dies by SIGKILL, as for want of memory."""
    (job.folder / "dying.py").write_text(
        "import os, time\nos.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(60)\n"
    )
    launcher = job.start([sys.executable, "-P", "-c", LAUNCH_RANKS], PYTHONPATH=str(job.folder))
    assert launcher.wait(START_WITHIN_S) == 1
    assert (
        job.stderr()
        == "[rank 1] was killed by SIGKILL. If nobody did that, the machine was out of memory (see dmesg).\n"
    )
    job.wait_until_gone(5)


@pytest.mark.timeout(120)
def test_a_ranks_death_is_told_and_not_what_it_does_to_its_peers(job):
    """Rank 0 is in a collective with the rank that dies, and raises at once."""
    launcher = job.start([*DRIVER, "dies", str(job.folder)], RANKS_PYTHON=preloaded_python())
    assert launcher.wait(START_WITHIN_S) == 1
    job.wait_until_gone(END_WITHIN_S)
    killed = (
        "[rank 1: actor, right] was killed by SIGKILL. If nobody did that, the machine was out "
        "of memory (see dmesg). "
    )
    assert job.stderr() == killed + "The job was at step 2, waiting for actor.die on rank 0, 1.\n"


@pytest.mark.timeout(120)
def test_a_bad_input_is_told_without_a_traceback(job):
    launcher = job.start([*preloaded(DRIVER), "refuses", str(job.folder)])
    assert launcher.wait(START_WITHIN_S) == 2
    assert job.stderr() == "train_iters (0) must be at least 1.\n"
    job.wait_until_gone(END_WITHIN_S)

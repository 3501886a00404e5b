"""The progress display, on a real pseudo-terminal and off it."""

import os
import pty
import re
import threading
import time
from io import StringIO

from megarl.loggers.console import Progress, clock
from tests.launch import run

METRICS = {
    "step": 3,
    "reward/mean": 0.5124,
    "response/length_mean": 21.42,
    "throughput/tokens_per_s": 3210.4,
    "time/step_s": 0.434,
    "other": 1.0,
}


def test_plain_lines_are_one_per_step_and_one_per_evaluation():
    out = StringIO()
    progress = Progress(20, out)
    progress.note("actor ready (1.2 s)")
    progress.show_evaluation(0, {"eval/reward": 0.25, "eval/reward_greedy": 0.3})
    progress.update(3, METRICS | {"reward/failed": 0.0})
    progress.update(4, {"reward/mean": 0.5, "reward/failed": 38.0})
    progress.show_evaluation(4, {"eval/failed": 2.0})
    progress.close()
    shown, after = out.getvalue().splitlines()[:3], out.getvalue().splitlines()[3:]
    assert after[0].startswith("step=4/20 reward=0.500 failed=38 left=")
    assert after[1:] == ["eval step=4/20 eval/failed=2"]
    assert shown == [
        "actor ready (1.2 s)",
        "eval step=0/20 eval/reward=0.250 eval/reward_greedy=0.300",
        "step=3/20 reward=0.512 length=21.4 tokens/s=3210 s/step=0.43 left=?",
    ]


def test_lines_come_for_the_first_step_every_interval_and_the_last():
    out = StringIO()
    progress = Progress(11, out, interval=4)
    for step in range(2, 12):  # resumed after step 1
        progress.update(step, {})
    assert re.findall(r"step=(\d+)/11", out.getvalue()) == ["2", "4", "8", "11"]


def test_time_left_is_measured_between_steps(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = Progress(10, StringIO())
    for step, took in (
        (1, 60.0),
        (2, 2.0),
        (3, 4.0),
    ):  # the first step's end starts the clock: what came before is set-up
        now += took
        progress.update(step, {})
    assert progress.time_left() == "0:21"  # 7 steps of 3 s
    assert clock(3723.4) == "1:02:03"


def test_a_terminal_gets_a_live_display_that_leaves_notes_standing():
    """The number of failed rewards is shown for the step that had some, and not any more after the next."""
    master, slave = pty.openpty()
    chunks: list[bytes] = []
    reader = threading.Thread(target=drain, args=(master, chunks))
    reader.start()
    with os.fdopen(slave, "w") as stream:
        progress = Progress(20, stream)
        progress.update(2, {"reward/failed": 4.0, "reward_2/failed": 5.0})
        progress.note("actor ready [1.2 s]")
        progress.update(3, METRICS)
        progress.close()
    reader.join(10)
    os.close(master)
    shown = b"".join(chunks).decode()
    assert "\x1b[" in shown and "3/20" in shown and "reward 0.512" in shown
    assert "actor ready [1.2 s]\r\n" in shown  # brackets are not markup
    assert "failed 4   failed_2 5" in shown and "failed" not in shown.rsplit("3/20", 1)[1]


def drain(master: int, chunks: list[bytes]) -> None:
    """Read a pseudo-terminal until its other end is closed, which Linux tells as an I/O error."""
    try:
        while chunk := os.read(master, 4096):
            chunks.append(chunk)
    except OSError:
        return


def test_off_a_terminal_nothing_heavy_is_imported():
    code = (
        "import sys, megarl.trainer.run_folder, megarl.runtime.torchrun; from megarl.loggers.console import "
        "Progress; Progress(1).note('x'); "
        "print([m for m in ('torch', 'rich', 'tensorboard', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = run("-P", "-c", code, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x\n[]\n", "")


class Gone(StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_reader_that_has_ended_ends_no_job():
    progress = Progress(3, Gone())
    progress.note("x")
    progress.update(1, METRICS)
    progress.close()

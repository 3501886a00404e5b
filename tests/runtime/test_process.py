"""How a process of a job ends."""

from __future__ import annotations

from tests.launch import run

SCRIPT = """
import atexit, sys, time
from concurrent.futures import ThreadPoolExecutor
from megarl.runtime.process import end_process

class Module:
    def __del__(self):
        print("unloaded")

module = Module()
atexit.register(print, "exit handler")

def work():
    time.sleep(0.2)
    print("thread")

ThreadPoolExecutor(1).submit(work)
print("last line")
end_process(3) if sys.argv[1] == "end" else sys.exit(3)
"""


def test_a_rank_ends_with_its_threads_and_exit_handlers_but_unloads_nothing():
    done = run("-c", SCRIPT, "end", timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split("\n") == ["last line", "thread", "exit handler", ""]
    assert "unloaded" in run("-c", SCRIPT, "exit", timeout=60).stdout

"""How a process of a job ends, and the environment that it has."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from megarl.runtime.local_ranks import LocalRanks
from megarl.runtime.process import without_rank
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


OF_THE_USER = {
    "LOCAL_JUDGE_URL": "http://localhost:8000",
    "ROLE_ARN": "arn:aws:iam::1:role/trainer",
    "GROUP_ID": "7",
    "MASTER_KEY": "k",
    "RANKER_URL": "http://ranker",
    "WORLD_SIZE_LIMIT": "8",
}
"""Variables that begin as those of torchrun do."""


def test_a_process_that_is_no_rank_gets_no_variable_of_torchrun_and_all_of_the_user():
    """The names are those in the source of torchrun's agent."""
    source = inspect.getsource(LocalElasticAgent)
    of_rank = set(re.findall(r'"([A-Z_]+)": |worker_env\["([A-Z_]+)"\]', source))
    names = {name for pair in of_rank for name in pair if name}
    assert {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} <= names
    no_ranks = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    others = OF_THE_USER.keys() | no_ranks
    assert without_rank(dict.fromkeys(names | others, "1")).keys() == others


def test_a_rank_has_the_users_variables(tmp_path, monkeypatch):
    (tmp_path / "reports_variables.py").write_text(
        "import json, os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], 'seen').write_text(json.dumps({**os.environ}))\n"
    )
    for name, value in {**OF_THE_USER, "PYTHONPATH": str(tmp_path), "LOCAL_WORLD_SIZE": "64"}.items():
        monkeypatch.setenv(name, value)
    ranks = LocalRanks([str(tmp_path)], 1, module="reports_variables")
    ranks.start_ranks()
    ranks.end(60.0)
    seen = json.loads((tmp_path / "seen").read_text())
    assert OF_THE_USER.items() <= seen.items() and seen["LOCAL_WORLD_SIZE"] == "1"


LATE = """
import ctypes, signal, sys
from megarl.runtime.process import ignore_signals_for_good

libc = ctypes.CDLL(None)
libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
signal.signal(signal.SIGTERM, lambda *_: None)
note = ctypes.CFUNCTYPE(None, ctypes.c_int)(libc.signal(signal.SIGTERM, int(signal.SIG_IGN)))  # CPython's
if sys.argv[1] == "for good":
    ignore_signals_for_good()
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(signal.SIGTERM)  # as a thread does that the kernel interrupted before the signal was ignored
print("goes on")
"""


def test_a_signal_that_a_thread_notes_too_late_is_not_complained_of():
    done = run("-c", LATE, "for good", timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
    assert "ignored due to race condition" in run("-c", LATE, "as Python does", timeout=60).stderr


STREAMS = """
import os, subprocess, sys
from megarl.runtime.process import open_standard_streams
open_standard_streams()
print("lost"); print("lost", file=sys.stderr); assert sys.stdin.read() == ""
child = "import sys; print('lost'); sys.stdout.flush(); sys.stderr.write('lost'); sys.exit(sys.stdin.read() != '')"
code = subprocess.run([sys.executable, "-c", child]).returncode
os.write(9, f"{code} {[os.path.exists(f'/proc/self/fd/{n}') for n in (0, 1, 2)]}".encode())
"""


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_opened_for_a_process_and_its_children(tmp_path, closed):
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(STREAMS)} 9>{tmp_path}/said {closed}"
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (done.returncode, (tmp_path / "said").read_text()) == (0, "0 [True, True, True]"), done.stderr


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_hangup_means_nothing_to_a_job_under_nohup(is_ignored):
    script = "from megarl.runtime import shutdown; print(*map(int, shutdown._HANDLED))"
    ignore = "trap '' HUP; " if is_ignored else ""
    command = f"{ignore}exec {shlex.quote(sys.executable)} -c {shlex.quote(script)}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == ("2 15\n" if is_ignored else "2 15 1\n"), done.stderr

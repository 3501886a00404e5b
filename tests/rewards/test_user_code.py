"""What a reward function may be and do: asynchronous, decorated, an object, with alarms, processes and imports.

The table is a contract about behaviour: it says nothing about the processes in which the function runs.

pytest tests/rewards/test_user_code.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.schema import DataConfig
from megarl.rewards import RewardSample
from megarl.rewards.pool import RewardPool

HEAD = "import asyncio, functools, os, signal, time\n"
ARGUMENTS = "data_source, solution_str, ground_truth, extra_info=None"
ASYNC = f"async def inner({ARGUMENTS}):\n    await asyncio.sleep(0.01)\n    return float(len(solution_str))\n"
FUNCTIONS = {
    "async def": (ASYNC, "inner", 3.0),
    "an async object": (
        f"class Judge:\n    async def __call__(self, {ARGUMENTS}):\n        await asyncio.sleep(0)\n"
        "        return {'score': 1.0, 'pred': 'x'}\njudge = Judge()\n",
        "judge",
        1.0,
    ),
    "an async class": (
        f"class Judge:\n    async def __call__(self, {ARGUMENTS}): return 2.0\n",
        "Judge",
        2.0,
    ),
    "a plain class": (f"class Judge:\n    def __call__(self, {ARGUMENTS}): return 2\n", "Judge", 2.0),
    "an async method": (f"class A:\n    async def f(self, {ARGUMENTS}): return 4.0\nf = A().f\n", "f", 4.0),
    "wrapped by a plain function": (
        ASYNC + "def deco(f):\n    @functools.wraps(f)\n    def wrapper(*a, **k): return f(*a, **k)\n"
        "    return wrapper\nf = deco(inner)\n",
        "f",
        3.0,
    ),
    "wrapped by an async function": (
        ASYNC
        + "def deco(f):\n    async def wrapper(**k): return 1 + await f(**k)\n    return wrapper\nf = deco(inner)\n",
        "f",
        4.0,
    ),
    "wrapped by one that adds an argument": (
        f"def deco(f):\n    @functools.wraps(f)\n    def wrapper(**k): return f(client=5, **k)\n    return wrapper\n"
        f"@deco\ndef f(client, {ARGUMENTS}): return client\n",
        "f",
        5.0,
    ),
    "partial": (f"async def f(a, {ARGUMENTS}): return a\ng = functools.partial(f, 6)\n", "g", 6.0),
    "one that runs a loop of its own": (ASYNC + "def f(**k): return asyncio.run(inner(**k))\n", "f", 3.0),
    "a client of the first call": (
        "lock = None\nasync def f(**k):\n    global lock\n    loop = asyncio.get_running_loop()\n"
        "    lock = lock or loop.create_future()\n    return float(lock.get_loop() is loop)\n",
        "f",
        1.0,
    ),
    "an alarm": (
        "def f(**k):\n    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n    signal.alarm(9)\n"
        "    try: return 1.0\n    finally: signal.alarm(0)\n",
        "f",
        1.0,
    ),
    "a spawned pool": (
        "import multiprocessing\ndef score(text): return float(len(text))\ndef f(solution_str, **k):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.apply(score, (solution_str,))\n",
        "f",
        3.0,
    ),
    "a spawned executor": (
        "import concurrent.futures as c, multiprocessing\nclass Score:\n"
        "    def __call__(self, text): return float(len(text))\ndef f(solution_str, **k):\n"
        "    with c.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:\n"
        "        return pool.submit(Score(), solution_str).result(60)\n",
        "f",
        3.0,
    ),
    "a module beside it": ("from helper import value\ndef f(**k): return value\n", "f", 7.0),
    "a package of the current folder": (
        "from scoring.sums import value\ndef f(**k): return value\n",
        "f",
        8.0,
    ),
    "its own folder first": ("import both\ndef f(**k): return both.value\n", "f", 9.0),
    "async and raises": (
        "async def f(**k): raise KeyError('planted')\n",
        "f",
        "raised KeyError: 'planted'\nTraceback",
    ),
    "async and exits": (
        "import sys\nasync def f(**k): sys.exit(3)\n",
        "f",
        "raised SystemExit: 3|exit code 3",
    ),
    "async and cancelled": ("async def f(**k): raise asyncio.CancelledError\n", "f", "raised CancelledError"),
    "async and returns text": ("async def f(**k): return 'x'\n", "f", r"returned 'x' \(str\)"),
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project with a reward in the folder `own`. The current folder is that of the project."""
    (own := tmp_path / "own").mkdir()
    (tmp_path / "scoring").mkdir()
    for path, value in (
        ("own/helper", 7.0),
        ("scoring/__init__", 0.0),
        ("scoring/sums", 8.0),
        ("own/both", 9.0),
    ):
        (tmp_path / f"{path}.py").write_text(f"value = {value}\n")
    (tmp_path / "both.py").write_text("value = 0.0\n")
    monkeypatch.chdir(tmp_path)
    return own


def verdicts(own: Path, text: str, name: str, *solutions: str, num_workers: int = 1, **limits) -> list:
    (own / "reward.py").write_text(HEAD + text)
    data = DataConfig(train_data=("x",), reward_function=f"own/reward.py:{name}", **limits)
    samples = [RewardSample("x", solution, None, sample_id=at) for at, solution in enumerate(solutions)]
    with RewardPool(data, num_workers) as pool:
        return pool.score(samples)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_reward_function_may_be(kind, project):
    text, name, wanted = FUNCTIONS[kind]
    found = verdicts(project, text, name, "two", "two")
    if isinstance(wanted, float):
        assert [(one.reward, one.failure) for one in found] == [(wanted, None)] * 2
    else:
        for one in found:
            with pytest.raises(ValueError, match=f"(?s){wanted}"):
                raise ValueError(one.failure)


@pytest.mark.parametrize("kind", ["async ", ""])
def test_a_call_that_is_late_costs_its_own_reward(kind, project):
    wait = "await asyncio.sleep" if kind else "time.sleep"
    text = f"{kind}def f(solution_str, **k):\n    if solution_str == 'late': {wait}(600)\n    return 1.0\n"
    found = verdicts(project, text, "f", "on time", "late", "on time", num_workers=2, reward_timeout_s=1.5)
    assert [one.reward for one in found] == [1.0, None, 1.0]
    assert "took longer than --reward-timeout-s (1.5)" in found[1].failure


MEETS = """
{kind}def f(solution_str, **k):
    {wait}(0.2)
    if solution_str != "first":
        open("here/" + solution_str, "w").close()
        end = time.monotonic() + 60
        while len(os.listdir("here")) < 5 and time.monotonic() < end: {wait}(0.01)
    return float(len(os.listdir("here")) >= 5 or solution_str == "first")
"""


@pytest.mark.parametrize("kind", ["async ", ""])
def test_calls_that_wait_run_many_at_a_time(kind, project):
    """No call but the first one returns before five have begun, and there is one process at first."""
    (project.parent / "here").mkdir()
    text = MEETS.format(kind=kind, wait="await asyncio.sleep" if kind else "time.sleep")
    # more calls than meet: the first to return let the others begin
    found = verdicts(
        project, text, "f", "first", *("first" for _ in range(12)), *"abcdefgh", reward_timeout_s=120.0
    )
    assert [one.reward for one in found] == [1.0] * 21


def test_a_number_of_processes_that_was_asked_for_is_kept(project):
    text = "def f(**k):\n    time.sleep(0.1)\n    return float(os.getpid())\n"
    found = verdicts(project, text, "f", *"abcdef", num_workers=2, reward_num_workers=2)
    assert len({one.reward for one in found}) == 2


@pytest.mark.parametrize(
    "file", ["def f(solution_str, ground_truth): return 1.0", "class f:\n    def __call__(self): ..."]
)
def test_a_signature_that_cannot_be_called_names_flag_signature_and_keywords(file, project):
    with pytest.raises(
        ValueError,
        match=r"^--reward-function \(own/reward.py:f\): its signature is \(.*keywords.*data_source",
    ):
        verdicts(project, file, "f", "x")

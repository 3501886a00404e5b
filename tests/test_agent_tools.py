"""megarl.tools: what a model gets of its expressions and programs, also of hostile ones.

pytest tests/test_agent_tools.py"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.environments import EnvSpec
from megarl.episodes.env_pool import EnvironmentPool
from megarl.tools import calculate, run_python


@pytest.mark.parametrize(
    "expression, result",
    [
        ("12 * (3 + 4)", "84"),
        ("7/2", "3.5"),
        ("7//2 - -3 % 5", "1"),
        (" 2**10 ", "1024"),
        ("2**-1", "0.5"),
        ("1/0", "error: division by zero"),
        ("9**9**9", "error: the number is too large"),
        ("10**4000 * 10**4000", "error: the number is too large"),
        ("1e308*10", "error: the number is too large"),
        ("(-8)**0.5", "error: the result is no real number"),
        ("1+", "error: this is no arithmetic expression"),
        ("1.0 ** 10 ** 400", "error: this is no arithmetic expression"),
        ("__import__('os').getpid()", "error: there are only numbers, + - * / // % ** and parentheses"),
        ("True + 1", "error: there are only numbers, + - * / // % ** and parentheses"),
        ("'a' * 9", "error: there are only numbers, + - * / // % ** and parentheses"),
        ("1" * 1001, "error: the expression is longer than 1000 characters"),
    ],
)
def test_the_calculator_works_out_arithmetic_and_nothing_else(expression, result):
    assert calculate(expression) == result


@given(st.text(alphabet="0123456789+-*/%.()e jx_'\"[]\\\n\x00", max_size=60))
def test_whatever_a_model_writes_the_calculator_answers_soon(text):
    started = time.monotonic()
    assert isinstance(calculate(text), str)
    assert time.monotonic() - started < 2


def test_sums_are_those_of_python():
    rng = random.Random(0)
    for _ in range(200):
        a, b, c = (rng.randint(-999, 999) for _ in range(3))
        assert calculate(f"({a} + {b}) * {c}") == str((a + b) * c)


CUT = "\n[cut at 10000 characters]"


@pytest.mark.parametrize(
    "program, says",
    [
        ("print(input()[::-1])", "olleh\n"),
        ("print(1)\nraise KeyError('x')", "1\nerror: KeyError: 'x'"),
        ("import time; time.sleep(60)", "error: the program took longer than 2 s"),
        ("import ctypes; ctypes.string_at(0)", "error: the program was killed by signal 11"),
        ("print('x' * 20000)", "x" * 10_000 + CUT),
        ("x = bytearray(1 << 30)", "error: MemoryError"),
        ("print('a', end='')\n1 / 0", "a\nerror: ZeroDivisionError: division by zero"),
        (
            "print('x' * 20000)\n1 / 0",
            "x" * 10_000 + CUT + "\nerror: ZeroDivisionError: division by zero",
        ),
        ("raise ValueError('x' * 20000)", ("error: ValueError: " + "x" * 20_000)[:10_000] + CUT),
    ],
)
def test_a_program_prints_or_says_why_not(program, says):
    assert run_python(program, stdin="hello\n", timeout_s=2.0, memory_limit_bytes=1 << 28) == says


@pytest.mark.parametrize(
    "program",
    [
        f"print(open({str(Path(__file__))!r}).read())",
        "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
    ],
    ids=["files", "network"],
)
def test_a_program_sees_neither_files_nor_the_network(program):
    assert run_python(program).startswith("error: ")


ENV = """
from megarl.tools import calculate, run_python

class Env:
    def reset(self, row):
        return [{"role": "user", "content": "go"}]
    def step(self, text):
        return [{"role": "tool", "content": calculate(text) + " " + run_python(f"print({text})")}], None, False
"""


def test_tools_work_in_the_threads_of_an_environments_process(tmp_path):
    (tmp_path / "env.py").write_text(ENV)
    with EnvironmentPool([EnvSpec(None, f"{tmp_path / 'env.py'}:Env")], 30.0, 8) as pool:
        numbers = [pool.open({}) for _ in range(4)]
        replies = []
        while len(replies) < 8:
            for reply in pool.replies(1.0):
                replies.append(reply)
                if len(replies) <= 4:
                    pool.step(reply.episode, f"{reply.episode}+10")
    said = {reply.episode: reply.messages[0]["content"] for reply in replies[4:]}
    assert said == {number: f"{number + 10} {number + 10}\n" for number in numbers}, replies


def test_importing_the_tools_imports_no_torch():
    code = "import sys, megarl.tools; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0

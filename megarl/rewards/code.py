"""--reward code: 1.0 if the response's program passes the tests of its row, else 0.0.

The program is the response's last fenced block, or all of it if there is none. `ground_truth` is JSON (as
text) of one of these forms:

    {"inputs": ["3 4\\n"], "outputs": ["7\\n"]}                        a whole program: stdin, and what must be on stdout
    {"fn_name": "add", "inputs": [[3, 4]], "outputs": [7]}           a function: arguments, and what it must return (APPS, TACO, PRIME)
    {"asserts": ["assert add(3, 4) == 7"]}                           statements that must not raise (MBPP)

The first two are judged outside of the sandbox, so that a program cannot pass without the right answer.
Statements run beside the program: one that looks for them can cheat."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

from megarl.config.schema import DataConfig
from megarl.rewards.sandbox import missing, refusal, run_confined

_BLOCKS = (
    re.compile(r"^[ \t]*```[^`\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE),
    re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL),
)
"""Fenced blocks as in Markdown, whose fences begin lines; then those whose fences stand anywhere."""
_CALL = """
import json as _json, sys as _sys, types as _types
_name, _arguments, _mark = _json.loads(_sys.stdin.read())
_sys.modules["solution"] = _module = _types.ModuleType("solution")  # where dataclasses look for names
_scope = _module.__dict__
exec(compile({program!r}, "program.py", "exec"), _scope)
_function = getattr(_scope["Solution"](), _name) if _name not in _scope and "Solution" in _scope else _scope[_name]
_sys.stdout.write("\\n" + _mark + _json.dumps(_function(*_arguments)))
"""
_ASSERTS = """
import json as _json, sys as _sys, types as _types
_sys.modules["solution"] = _module = _types.ModuleType("solution")  # where dataclasses look for names
_scope = _module.__dict__
exec(compile({program!r}, "program.py", "exec"), _scope)
_asserts, _mark = _json.loads(_sys.stdin.read())
for _assert in _asserts:
    exec(_assert, _scope)
_sys.stdout.write("\\n" + _mark)
"""
_FORMS = (
    '{"inputs": [...], "outputs": [...]}, {"fn_name": ..., "inputs": [...], "outputs": [...]} '
    'or {"asserts": [...]}'
)


class CodeReward:
    """Reward function that returns 1.0 if the response's program passes every test, else 0.0. Its constructor
    raises ValueError where programs cannot be confined."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        if (lacking := missing()) and not data.allow_unsandboxed_code:
            raise ValueError(refusal(lacking))

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: str | None,
        extra_info: dict[str, Any] | None = None,
    ) -> float:
        """Return 1.0 if the response's program passes every test in `ground_truth`, else 0.0. Raises:
        ValueError if `ground_truth` is not JSON with tests."""
        tests = read_tests(ground_truth)
        return float(all(self._passes(test, program_of(solution_str)) for test in tests))

    def _passes(self, test: tuple, program: str) -> bool:
        kind, given, wanted = test
        if kind == "stdin":
            stdout = self._run(program, given)
            return stdout is not None and _lines(stdout) == _lines(wanted)
        mark = secrets.token_hex(16)  # not to be guessed, so that what the program prints is no answer
        stdout = self._run(
            (_CALL if kind == "call" else _ASSERTS).format(program=program), json.dumps([*given, mark])
        )
        before, found, answer = (stdout or "").rpartition("\n" + mark)
        return bool(found) and (kind == "asserts" or _equal(answer, wanted))

    def _run(self, program: str, stdin: str) -> str | None:
        """Run a program in the sandbox. Returns its stdout; None if it failed or took too long."""
        data = self.data
        outcome = run_confined(
            program, stdin, data.code_timeout_s, data.code_memory_limit_bytes, data.allow_unsandboxed_code
        )
        return outcome.stdout if outcome.exit_code == 0 else None


def program_of(response: str) -> str:
    """Return the last fenced block of a response, else the complete response."""
    text = response.replace("\r\n", "\n")
    return next((found[-1] for kind in _BLOCKS if (found := kind.findall(text))), response)


def read_tests(ground_truth: str | None) -> list[tuple]:
    """Return (kind, input, wanted output) of each test in `ground_truth`. Raises: ValueError if that is not
    JSON with tests in one of the forms."""
    try:
        tests = json.loads(ground_truth or "null")
    except (ValueError, RecursionError):  # not JSON; brackets in brackets
        tests = None
    found = list(_tests(tests)) if isinstance(tests, dict) else []
    if not found:
        shown = repr(ground_truth)[:200]
        raise ValueError(
            f"ground_truth is {shown}; the code reward wants JSON of one of the forms {_FORMS}, "
            "with at least one test."
        )
    return found


def _tests(tests: dict) -> Iterator[tuple]:
    asserts, inputs, outputs, name = (tests.get(key) for key in ("asserts", "inputs", "outputs", "fn_name"))
    if isinstance(asserts, list) and all(isinstance(a, str) for a in asserts):
        if asserts:
            yield "asserts", [asserts], None
    elif isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
        if isinstance(name, str) and all(isinstance(i, list) for i in inputs):
            yield from (("call", [name, given], wanted) for given, wanted in zip(inputs, outputs))
        elif name is None and all(isinstance(x, str) for x in (*inputs, *outputs)):
            yield from (("stdin", given, wanted) for given, wanted in zip(inputs, outputs))


def _lines(text: str) -> list[str]:
    """Return the lines of a text without blanks at their ends, and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")


def _equal(answer: str, wanted: object) -> bool:
    """Return whether an answer in JSON equals the wanted result, or is its only element, as APPS wraps some
    results. JSON has lists only, so a tuple equals a list."""
    try:
        got = json.loads(answer)
    except (ValueError, RecursionError):  # not JSON; brackets in brackets
        return False
    return got == wanted or isinstance(wanted, list) and len(wanted) == 1 and [got] == wanted

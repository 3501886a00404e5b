"""Work out arithmetic, and run Python programs in the sandbox.

calculate("12 * (3 + 4)")                     "84"
run_python("print(sum(range(10)))")           "45\\n"
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from megarl.rewards.sandbox import missing, run_confined

_MAX_EXPRESSION = 1000  # characters
_MAX_BITS = 4096
_MAX_OUTPUT = 10_000  # characters
_OPERATORS: dict[type[ast.AST], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class _Refused(ValueError):
    """Raised for an expression that is no arithmetic, or too large. The text is for the model."""


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text, or `error: ...`.

    There are numbers, + - * / // % ** and parentheses. Nothing is executed: the expression is read as a
    tree, and the sizes of its numbers are limited, so that 9**9**9 is an error and not an hour."""
    if len(expression) > _MAX_EXPRESSION:
        return f"error: the expression is longer than {_MAX_EXPRESSION} characters"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except _Refused as error:
        return f"error: {error}"
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return "error: this is no arithmetic expression"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(inner))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            a, b = _value(left), _value(right)
            if isinstance(sign, ast.Pow):
                _check_power(a, b)
            return _checked(_OPERATORS[type(sign)](a, b))
    raise _Refused("there are only numbers, + - * / // % ** and parentheses")


def _check_power(base: int | float, exponent: int | float) -> None:
    """Raise _Refused for a power whose computation would take long."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
        raise _Refused("the number is too large")


def _checked(number: int | float | complex) -> int | float:
    if isinstance(number, complex):
        raise _Refused("the result is no real number")
    if isinstance(number, int) and number.bit_length() > _MAX_BITS or number in (float("inf"), -float("inf")):
        raise _Refused("the number is too large")
    return number


def run_python(
    program: str,
    *,
    stdin: str = "",
    timeout_s: float = 10.0,
    memory_limit_bytes: int = 1 << 30,
    allow_unsandboxed: bool = False,
) -> str:
    """Run a Python program in the sandbox of --reward code. Returns what it printed; after that, if it
    failed, a line `error: ...` with the end of its traceback. Of a program that was killed only `error: ...`.

    A program has an empty folder, no network and no other files, see docs/security.md.

    Args:
        stdin: text that the program reads.
        allow_unsandboxed: run it also where the machine cannot confine it.
    Raises: RuntimeError where the machine cannot confine programs, unless `allow_unsandboxed`."""
    if (lacking := missing()) and not allow_unsandboxed:
        raise RuntimeError(
            f"run_python: this machine cannot confine programs: {' and '.join(lacking)} missing. Run where "
            "they are allowed, or, if nothing within reach of this user matters, pass allow_unsandboxed=True."
        )
    outcome = run_confined(program, stdin, timeout_s, memory_limit_bytes, allow_unsandboxed)
    if outcome.exit_code == 0:
        return _cut(outcome.stdout)
    if outcome.exit_code is None:
        return f"error: the program took longer than {timeout_s:g} s"
    if outcome.exit_code < 0:
        return f"error: the program was killed by signal {-outcome.exit_code}"
    why = outcome.stderr.strip().splitlines()[-1:] or [f"exit code {outcome.exit_code}"]
    printed = _cut(outcome.stdout)
    gap = "\n" if printed and not printed.endswith("\n") else ""
    return printed + gap + _cut(f"error: {why[0]}")


def _cut(text: str) -> str:
    """Return the text without what exceeds the limit on a tool's output."""
    return text if len(text) <= _MAX_OUTPUT else f"{text[:_MAX_OUTPUT]}\n[cut at {_MAX_OUTPUT} characters]"

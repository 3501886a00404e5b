"""Mark the errors whose message tells a user enough, so that the driver shows them without a traceback."""

from __future__ import annotations

from typing import ClassVar


class ExplainedError(Exception):
    """Base class of errors whose message says what went wrong and where. The traceback goes to failure.log.

    Derive from it beside the fitting built-in class: class GateError(ExplainedError, RuntimeError)."""

    read_on: ClassVar[str] = "docs/debugging.md, section Read a failure"
    """Page and section that explain the error."""


def last_line(error: BaseException) -> str:
    """Return "GateError: <message>", the short form of an explained error, as a traceback would end."""
    return f"{type(error).__name__}: {error}"

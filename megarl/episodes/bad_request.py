"""Define the error for a request of an agent that is refused, and checks that all dialects share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from megarl.episodes.json_values import json_problem

_DEEPEST = 64
_Body = TypeVar("_Body")


class BadRequest(Exception):
    """Raised for a request of an agent that the endpoint refuses.

    Args:
        code: OpenAI's error code, or one of our own.
        param: the field at fault."""

    def __init__(
        self, message: str, code: str = "invalid_value", param: str | None = None, status: int = 400
    ):
        super().__init__(message)
        self.message, self.code, self.param, self.status = message, code, param, status

    @property
    def body(self) -> dict[str, Any]:
        """The error as the JSON object with which OpenAI's API reports one."""
        kinds = {401: "authentication_error", 500: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def decode(decoder: msgspec.json.Decoder[_Body], data: bytes, what: str) -> _Body:
    """Return the decoded body of a request. Raises: BadRequest if the body is not JSON, or not of the
    decoder's type."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request is not {what}: {error}", "invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", "invalid_json") from error


def refuse_unsupported(fields: Sequence[tuple[str, object, str]]) -> None:
    """Raise BadRequest for the first field that is given. `fields` has (name, whether the field is given, why
    it is not supported)."""
    for name, is_given, why in fields:
        if is_given:
            raise BadRequest(f"{name} is not supported: {why}", "unsupported_parameter", name)


def refuse_deep(value: object, where: str) -> None:
    """Raise BadRequest if a JSON value is nested too deeply for the code that reads it later."""
    layer = [value]
    for _ in range(_DEEPEST):
        inner: list[object] = []
        for one in layer:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        if not inner:
            return
        layer = inner
    raise BadRequest(f"{where} is nested deeper than {_DEEPEST} levels", "invalid_value", where)


def refuse_unstorable(value: object, where: str) -> None:
    """Raise BadRequest if no log and no checkpoint can hold a JSON value, or if it is nested too deeply."""
    if (problem := json_problem(value, where)) is not None:
        raise BadRequest(problem, "invalid_value", where)


def read_arguments(text: str, where: str) -> dict[str, Any]:
    """Return the arguments of a tool call. Raises: BadRequest if they are no JSON object."""
    try:
        found = json.loads(text) if text.strip() else {}
        json.dumps(found, ensure_ascii=False).encode()  # fails for halves of surrogate pairs
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadRequest(f"{where}.arguments must be a JSON object as text: {text[:80]!r}", param=where)
    refuse_deep(found, f"{where}.arguments")
    return found


def tool_problem(names: Sequence[str], takes_tools: bool, wants_calls: bool) -> None:
    """Raise BadRequest if the job cannot serve tools of these names."""
    if names and wants_calls and not takes_tools:
        raise BadRequest(
            "tools is not supported: this job finds no tool calls in answers. Give it --tool-call-parser, e.g. "
            "hermes, or describe the tools in a message",
            "unsupported_parameter",
            "tools",
        )
    for index, name in enumerate(names):
        if not name.strip() or name in names[:index]:
            raise BadRequest(
                f"tools[{index}] must have a name that no other tool has: {name[:80]!r}",
                param=f"tools[{index}]",
            )

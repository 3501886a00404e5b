"""Define the error for a request of an agent that is refused, and checks that all dialects share."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from megarl.episodes.json_values import json_problem

_Body = TypeVar("_Body")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tell_once = functools.cache(logging.getLogger(__name__).warning)
_VALUE = msgspec.json.Decoder(Any)
_OTHER_ANSWERS = {
    "the job decides how it samples": (
        *("allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "presence_penalty"),
        *("repetition_penalty", "use_beam_search"),
    ),
    "the job decides where answers end: use --stop-token-ids": (
        "ignore_eos",
        "min_tokens",
        "stop_token_ids",
    ),
    "answers are sampled without a grammar": (
        *("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
    ),
    "the job decides how messages become a prompt": (
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
    ),
}
"""Why fields of OpenAI's and vLLM's requests are refused that ask for another answer than the job's."""


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


def how_of(
    stop: str | Sequence[str] | None, form: Mapping[str, Any] | None, where: str = "response_format"
) -> dict[str, Any]:
    """Return how an answer is sampled, as far as a request says so: `stop`, the texts that end it, and
    `schema`, the JSON schema that it must have.

    Args:
        form: a response format, named `where` in errors.
    Raises: BadRequest for an empty stop string or another format."""
    how: dict[str, Any] = {"stop": [stop] if isinstance(stop, str) else [*stop]} if stop else {}
    if "" in how.get("stop", ()):
        raise BadRequest("a stop string must not be empty", param="stop")
    match form or {"type": "text"}:
        case {"type": "text"}:
            pass
        case {"type": "json_object"}:
            how["schema"] = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}} | {
            "type": "json_schema",
            "schema": dict(schema),
        }:
            how["schema"] = schema
        case _:
            raise BadRequest(f"{where} must be text, json_object, or json_schema with a schema", param=where)
    return how


def wants_calls(choice: object, has_tools: bool) -> bool:
    """Return whether tool_choice allows calls. One that forces a call is taken as auto."""
    if choice not in (None, "auto", "none"):
        _tell_once(
            "an agent's tool_choice forces a call, and is taken as auto: forced calls could not be trained on"
        )
    return has_tools and choice != "none"


def refuse_other_answers(data: bytes) -> None:
    """Raise BadRequest for a field of OpenAI's or vLLM's that asks for another answer than the job's.

    Values that change nothing are accepted: null, false, 0, what is empty, and a repetition_penalty of 1.

    Args:
        data: body of a request, a JSON object."""
    given = decode(_FIELDS, data, "an object")
    for why, names in _OTHER_ANSWERS.items():
        for name in filter(given.__contains__, names):
            value = decode(_VALUE, given[name], "JSON")
            is_neutral = not value or (name == "repetition_penalty" and value == 1)
            refuse_unsupported([(name, not is_neutral, why)])


def refuse_unstorable(value: object, where: str, any_integer: bool = False) -> None:
    """Raise BadRequest if no log and no checkpoint can hold a JSON value, or if it is nested too deeply.

    Args:
        any_integer: whether integers may have more than 64 bits, as in calls that the model has written."""
    if (problem := json_problem(value, where, any_integer)) is not None:
        raise BadRequest(problem, "invalid_value", where)


def read_arguments(text: str, where: str) -> dict[str, Any]:
    """Return the arguments of a tool call. Raises: BadRequest if they are no JSON object."""
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadRequest(f"{where}.arguments must be a JSON object as text: {text[:80]!r}", param=where)
    refuse_unstorable(found, f"{where}.arguments", any_integer=True)
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

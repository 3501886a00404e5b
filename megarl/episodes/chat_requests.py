"""Read requests of OpenAI's chat completions, and write the replies. Knows no server.

The job decides how it samples: a client's temperature, top_p and seed have no effect, and its limit of tokens
may only lower the job's. What would need another answer than the model's text is refused by name."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from megarl.episodes.chat import Message
from megarl.episodes.environments import Usage

MODEL = "policy"
"""Name of the model that is trained. Requests may give any name."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_LARGEST_NUMBER = 2**31 - 1


class BadRequest(Exception):
    """Raised for a request that is refused.

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
        """The error in OpenAI's form."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str
    messages: list[_Message]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


_DECODER = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one answer."""

    messages: list[Message]
    max_tokens: int | None
    stream: bool
    include_usage: bool


def read_chat_request(data: bytes) -> ChatRequest:
    """Return the request in the body of a POST. Raises: BadRequest with the reason and the field."""
    try:
        body = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request is not a chat completion: {error}", "invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", "invalid_json") from error
    _refuse_unsupported(body)
    wanted = [one for one in (body.max_completion_tokens, body.max_tokens) if one is not None]
    if wanted and not 1 <= min(wanted) <= max(wanted) <= _LARGEST_NUMBER:
        raise BadRequest("max_tokens must be a positive number of 31 bits at most", param="max_tokens")
    return ChatRequest(
        _messages(body.messages),
        min(wanted, default=None),
        bool(body.stream),
        bool(body.stream_options and body.stream_options.include_usage),
    )


def _refuse_unsupported(body: _Body) -> None:
    """Raises: BadRequest for a field that asks for what is not there yet."""
    if body.n not in (None, 1):
        raise BadRequest(
            f"n ({body.n}) must be 1: an episode is one conversation, and a second answer to the same messages "
            "would begin another. Use --num-samples-per-prompt.",
            "unsupported_value",
            "n",
        )
    text_only = body.response_format in (None, {"type": "text"})
    for name, is_given, why in (
        ("tools", body.tools, "tool calls are not parsed yet: describe the tools in a message"),
        ("functions", body.functions, "function calls are not parsed yet: describe them in a message"),
        ("logprobs", body.logprobs, "log-probs are recorded by the job and are not returned"),
        ("return_token_ids", body.return_token_ids, "token ids are recorded by the job and are not returned"),
        ("stop", body.stop, "the job decides where answers end: use --stop-token-ids"),
        ("response_format", not text_only, "answers are sampled without a grammar"),
    ):
        if is_given:
            raise BadRequest(f"{name} is not supported: {why}", "unsupported_parameter", name)


def _messages(given: list[_Message]) -> list[Message]:
    """Return the messages with their content as text. Raises: BadRequest for one that is not understood."""
    if not given:
        raise BadRequest("messages is empty", param="messages")
    found = []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise BadRequest(
                f"{where}.role must be one of {', '.join(ROLES)}: {message.role[:80]!r}", param=where
            )
        if message.tool_calls or message.function_call:
            raise BadRequest(
                f"{where}.tool_calls is not supported: tool calls are not parsed yet",
                "unsupported_parameter",
                where,
            )
        one: Message = {"role": message.role, "content": _text(message, where)}
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                one[name] = value
        found.append(one)
    if found[-1]["role"] == "assistant":
        raise BadRequest(
            "the last message is the assistant's: an answer that was begun is not continued. "
            "Put a message of another role behind it.",
            param=f"messages[{len(found) - 1}]",
        )
    return found


def _text(message: _Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise BadRequest(f"{where}.content is missing", "missing_required_parameter", where)
    for at, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise BadRequest(
                f"{where}.content[{at}] must be a part with type text and a text: other parts are not "
                "supported",
                "unsupported_value",
                f"{where}.content[{at}]",
            )
    return "".join(part.text or "" for part in message.content)


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer of the model to a request."""

    text: str
    usage: Usage

    @property
    def _head(self) -> dict[str, Any]:
        return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": MODEL}

    @property
    def _usage(self) -> dict[str, int]:
        prompt, sampled = self.usage.num_prompt, self.usage.num_sampled
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    @property
    def _finish_reason(self) -> str:
        return "length" if self.usage.is_cut else "stop"

    def body(self) -> dict[str, Any]:
        """Return the answer as one JSON object."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text, "refusal": None},
            "logprobs": None,
            "finish_reason": self._finish_reason,
        }
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": self._usage}

    def events(self, include_usage: bool) -> bytes:
        """Return the answer as a stream of server-sent events."""
        head = {**self._head, "object": "chat.completion.chunk"}
        deltas = (({"role": "assistant", "content": self.text}, None), ({}, self._finish_reason))
        chunks: list[dict[str, Any]] = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
            for delta, finish in deltas
        ]
        if include_usage:
            chunks.append({**head, "choices": [], "usage": self._usage})
        lines = [json.dumps(chunk) for chunk in chunks]
        return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()

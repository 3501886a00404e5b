"""Read requests of OpenAI's chat completions, and write the replies, independently of any server.

The job decides how it samples: a client's temperature, top_p and seed have no effect, and its limit of tokens
may only lower the job's. What would need another answer than the model's text is refused by name."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from megarl.episodes.answers import Completion, Tool, called
from megarl.episodes.bad_request import (
    BadRequest,
    decode,
    how_of,
    read_arguments,
    refuse_other_answers,
    refuse_unstorable,
    refuse_unsupported,
    tool_problem,
    wants_calls,
)
from megarl.episodes.chat import Message
from megarl.packing import MAX_BRANCHES

MODEL = "policy"
"""Name of the model that is trained. Requests may give any name."""
ROLES = ("system", "developer", "user", "assistant", "tool")

LARGEST_NUMBER = 2**31 - 1


def role_of(role: str) -> str:
    """Return the role that chat templates know: "system" for `developer`, which is the API's newer name for it.

    A template may leave out what has a role that it does not know."""
    return "system" if role == "developer" else role


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None
    type: str = "function"


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: str
    function: _Function


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None
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
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    stop: str | list[str] | None = None
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
    include_usage: bool = False
    tools: list[Tool] = field(default_factory=list)
    """The tools that the model is shown."""
    wants_calls: bool = True
    """Whether calls are looked for in the answer."""
    is_single_call: bool = False
    """Whether only the first call is wanted."""
    count: int = 1
    """Number of answers."""
    how: dict[str, Any] = field(default_factory=dict)
    """How answers are sampled, see `how_of`."""

    def repeats(self, other: object) -> bool:
        """Return whether this request asks for what the other one does."""
        return (
            isinstance(other, ChatRequest)
            and replace(
                self, max_tokens=other.max_tokens, stream=other.stream, include_usage=other.include_usage
            )
            == other
        )


def read_chat_request(data: bytes, takes_tools: bool = False) -> ChatRequest:
    """Return the request in the body of a POST. Raises: BadRequest with the reason and the field.

    Args:
        takes_tools: whether the job finds tool calls in answers."""
    body = decode(_DECODER, data, "a chat completion")
    _refuse_unsupported(body)
    refuse_other_answers(data)
    allows_calls = wants_calls(body.tool_choice, bool(body.tools))
    tools = _tools(body.tools or [], takes_tools, allows_calls)
    wanted = [one for one in (body.max_completion_tokens, body.max_tokens) if one is not None]
    if wanted and not 1 <= min(wanted) <= max(wanted) <= LARGEST_NUMBER:
        raise BadRequest("max_tokens must be a positive number of 31 bits at most", param="max_tokens")
    return ChatRequest(
        _messages(body.messages),
        min(wanted, default=None),
        bool(body.stream),
        bool(body.stream_options and body.stream_options.include_usage),
        tools,
        allows_calls,
        body.parallel_tool_calls is False,
        1 if body.n is None else body.n,
        how_of(body.stop, body.response_format),
    )


def _tools(given: list[dict[str, Any]], takes_tools: bool, wants_calls: bool) -> list[Tool]:
    """Return the tools as they were given. Raises: BadRequest for a malformed tool."""
    names = []
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise BadRequest(f"{where}.type must be function", "unsupported_value", where)
        try:
            names.append(msgspec.convert(tool, _Tool).function.name)
        except msgspec.ValidationError as error:
            raise BadRequest(f"{where} is not a tool: {error}", "invalid_type", where) from error
        refuse_unstorable(tool, where)
    tool_problem(names, takes_tools, wants_calls)
    return given


def _refuse_unsupported(body: _Body) -> None:
    """Raise BadRequest for a field that asks for an unsupported feature."""
    if body.n is not None and not 1 <= body.n <= MAX_BRANCHES:
        raise BadRequest(f"n ({body.n}) must be from 1 to {MAX_BRANCHES}", param="n")
    fields = (
        ("functions", body.functions, "give tools, which have taken its place"),
        ("logprobs", body.logprobs, "log-probs are recorded by the job and are not returned"),
        ("return_token_ids", body.return_token_ids, "token ids are recorded by the job and are not returned"),
    )
    refuse_unsupported(fields)


def _messages(given: list[_Message]) -> list[Message]:
    """Return the messages with their content as text. Raises: BadRequest for a malformed message."""
    found: list[Message] = []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise BadRequest(
                f"{where}.role must be one of {', '.join(ROLES)}: {message.role[:80]!r}", param=where
            )
        if message.function_call:
            raise BadRequest(
                f"{where}.function_call is not supported: give tool_calls", "unsupported_parameter", where
            )
        one: Message = {"role": role_of(message.role), "content": _text(message, where)}
        if message.tool_calls:
            one["tool_calls"] = _given_calls(message, f"{where}.tool_calls")
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                one[name] = value
        found.append(one)
    check_last_message(found)
    return found


def check_last_message(messages: Sequence[Message]) -> None:
    """Raise BadRequest if there is no message, or the last one is the assistant's."""
    if not messages:
        raise BadRequest("messages is empty", param="messages")
    if messages[-1]["role"] == "assistant":
        raise BadRequest(
            "the last message is the assistant's: an answer that was begun is not continued. "
            "Put a message of another role behind it.",
            param=f"messages[{len(messages) - 1}]",
        )


def _given_calls(message: _Message, where: str) -> list[dict[str, Any]]:
    """Return the calls of a message as chat templates read them. Raises: BadRequest for a malformed call."""
    if message.role != "assistant":
        raise BadRequest(f"{where} belongs to messages of the assistant only", param=where)
    found = []
    for at, call in enumerate(message.tool_calls or []):
        if call.type != "function":
            raise BadRequest(f"{where}[{at}].type must be function", "unsupported_value", where)
        arguments = read_arguments(call.function.arguments, f"{where}[{at}].function")
        found.append(called(call.id, call.function.name, arguments))
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


def chat_body(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answers to a request as the JSON object with which the API of chat completions replies."""
    choices = [_choice(index, completion) for index, completion in enumerate(completions)]
    return {**_head(), "object": "chat.completion", "choices": choices, "usage": _usage(completions)}


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
    if completion.reasoning is not None:
        message |= _reasoning(completion.reasoning)
    if completion.tool_calls:
        message |= {"content": completion.text or None, "tool_calls": _calls(completion)}
    finish = _finish_reason(completion)
    return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}


def chat_events(completions: Sequence[Completion], include_usage: bool) -> bytes:
    """Return the answers to a request as the server-sent events with which the API of chat completions streams
    them."""
    head = {**_head(), "object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish}]}
        for index, completion in enumerate(completions)
        for delta, finish in [
            *((delta, None) for delta in _deltas(completion)),
            ({}, _finish_reason(completion)),
        ]
    ]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": _usage(completions)})
    lines = [json.dumps(chunk) for chunk in chunks]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


def _deltas(completion: Completion) -> list[dict[str, Any]]:
    """Return the parts of an answer's message in a stream."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": completion.text}]
    if completion.reasoning is not None:  # SDKs join the roles of all deltas, so there is one
        deltas = [{"role": "assistant", **_reasoning(completion.reasoning)}, {"content": completion.text}]
    return deltas + [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(_calls(completion))]


def _head() -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": MODEL}


def _reasoning(text: str) -> dict[str, str]:
    """Return the reasoning under two names: vLLM's own, and the one that other servers and older clients
    use."""
    return {"reasoning": text, "reasoning_content": text}


def _calls(completion: Completion) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in completion.tool_calls
    ]


def _usage(completions: Sequence[Completion]) -> dict[str, int]:
    prompt = completions[0].usage.num_prompt
    sampled = sum(completion.usage.num_sampled for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _finish_reason(completion: Completion) -> str:
    if completion.usage.is_cut:
        return "length"
    return "tool_calls" if completion.tool_calls else "stop"

"""Read requests of Anthropic's Messages API, and write the replies, independently of any server.

A request becomes the `ChatRequest` that the same conversation is in OpenAI's form, so an episode has the same
tokens in both dialects. As there, the job decides how it samples."""

from __future__ import annotations

import json
import uuid
from typing import Any

import msgspec

from megarl.episodes.answers import Completion, Tool, called
from megarl.episodes.bad_request import (
    BadRequest,
    decode,
    how_of,
    refuse_unstorable,
    refuse_unsupported,
    tool_problem,
    wants_calls,
)
from megarl.episodes.chat import Message
from megarl.episodes.chat_requests import LARGEST_NUMBER, MODEL, ChatRequest, check_last_message

_UNREAD = ("thinking", "redacted_thinking")
"""Blocks of an answer that clients send back, and that are not part of the conversation's text."""


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[_Block] | None = None
    is_error: bool | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None


class _ToolChoice(msgspec.Struct):
    type: str
    disable_parallel_tool_use: bool | None = None


class _Body(msgspec.Struct):
    model: str
    messages: list[_Message]
    max_tokens: int
    system: str | list[_Block] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_format: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None


_DECODER = msgspec.json.Decoder(_Body)


def read_messages_request(data: bytes, takes_tools: bool = False) -> ChatRequest:
    """Return the request in the body of a POST. Raises: BadRequest with the reason and the field.

    Args:
        takes_tools: whether the job finds tool calls in answers."""
    body = decode(_DECODER, data, "a request of the Messages API")
    refuse_unsupported([("mcp_servers", body.mcp_servers, "the agent calls its tools itself")])
    if not 1 <= body.max_tokens <= LARGEST_NUMBER:
        raise BadRequest("max_tokens must be a positive number of 31 bits at most", param="max_tokens")
    allows_calls = wants_calls(body.tool_choice and body.tool_choice.type, bool(body.tools))
    tools = _tools(body.tools or [], takes_tools, allows_calls)
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    check_last_message(messages)
    is_single_call = body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use)
    return ChatRequest(
        messages,
        body.max_tokens,
        bool(body.stream),
        tools=tools,
        wants_calls=allows_calls,
        is_single_call=is_single_call,
        how=how_of(body.stop_sequences, body.output_format or (body.output_config or {}).get("format")),
    )


def _tools(given: list[_Tool], takes_tools: bool, wants_calls: bool) -> list[Tool]:
    """Return the tools in OpenAI's form, which chat templates read. Raises: BadRequest for a tool that the
    server would have to run."""
    found: list[Tool] = []
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise BadRequest(
                f"{where}.type ({tool.type[:80]}) must be custom: the endpoint runs no tools of its own",
                "unsupported_value",
                where,
            )
        refuse_unstorable(tool.input_schema, where)
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        found.append({"type": "function", "function": {**function, "parameters": tool.input_schema}})
    tool_problem([tool.name for tool in given], takes_tools, wants_calls)
    return found


def _messages(message: _Message, where: str) -> list[Message]:
    """Return one of Anthropic's messages as the messages that a chat template reads: every tool result
    becomes a message of the role tool. Raises: BadRequest for a malformed message."""
    if message.role not in ("user", "assistant"):
        raise BadRequest(f"{where}.role must be user or assistant: {message.role[:80]!r}", param=where)
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_of_assistant(message.content, where)]
    found: list[Message] = []
    for at, block in enumerate(message.content):
        here = f"{where}.content[{at}]"
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise BadRequest(f"{here}.tool_use_id is missing", "missing_required_parameter", here)
            result = "" if block.content is None else _text(block.content, here)
            found.append({"role": "tool", "content": result, "tool_call_id": block.tool_use_id})
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += _text([block], here)
        else:
            found.append({"role": "user", "content": _text([block], here)})
    if not found:
        raise BadRequest(f"{where}.content is empty", param=where)
    return found


def _of_assistant(blocks: list[_Block], where: str) -> Message:
    texts, calls = "", []
    for at, block in enumerate(blocks):
        here = f"{where}.content[{at}]"
        if block.type == "tool_use":
            if block.name is None or block.id is None or block.input is None:
                raise BadRequest(f"{here} must have id, name and input", "missing_required_parameter", here)
            refuse_unstorable(block.input, here, any_integer=True)
            calls.append(called(block.id, block.name, block.input))
        elif block.type not in _UNREAD:
            texts += _text([block], here)
    return {"role": "assistant", "content": texts} | ({"tool_calls": calls} if calls else {})


def _text(given: str | list[_Block], where: str) -> str:
    """Return the text of a string or of a list of text blocks. Raises: BadRequest for a block of another
    type."""
    if isinstance(given, str):
        return given
    for block in given:
        if block.type != "text" or block.text is None:
            raise BadRequest(
                f"{where} has a block of type {block.type[:80]!r}: must be a block with type text and a text, others "
                "are not supported here",
                "unsupported_value",
                where,
            )
    return "".join(block.text or "" for block in given)


def messages_body(completion: Completion) -> dict[str, Any]:
    """Return an answer as the JSON object with which the Messages API replies."""
    usage = {**_usage(completion), "output_tokens": completion.usage.num_sampled}
    head = {**_head(), "content": _blocks(completion)}
    return {**head, **_stop_reason(completion), "usage": usage}


def messages_events(completion: Completion) -> bytes:
    """Return an answer as the server-sent events with which the Messages API streams it."""
    start = {**_head(), "content": [], "stop_reason": None, "stop_sequence": None}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**start, "usage": {**_usage(completion), "output_tokens": 0}}}
    ]
    for index, block in enumerate(_blocks(completion)):
        empty, deltas = _as_deltas(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    usage = {"output_tokens": completion.usage.num_sampled}
    delta = {"type": "message_delta", "delta": _stop_reason(completion), "usage": usage}
    events += [delta, {"type": "message_stop"}]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()


def error_body(error: BadRequest) -> dict[str, Any]:
    """Return a refusal in Anthropic's form. The code of OpenAI's form stands in front of the message."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": f"{error.code}: {error.message}"}}


def _head() -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": MODEL}


def _blocks(completion: Completion) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if completion.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": completion.reasoning, "signature": ""})
    if completion.text or not completion.tool_calls:
        blocks.append({"type": "text", "text": completion.text})
    for call in completion.tool_calls:
        arguments = json.loads(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _as_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the two parts in which a content block is streamed: the empty block, and the deltas that fill
    it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}]
    arguments = json.dumps(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _usage(completion: Completion) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": completion.usage.num_prompt, **cached}


def _stop_reason(completion: Completion) -> dict[str, str | None]:
    """Return why an answer has ended, and the text that ended it."""
    if completion.usage.is_cut:
        reason = "max_tokens"
    elif completion.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if completion.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": completion.stop}

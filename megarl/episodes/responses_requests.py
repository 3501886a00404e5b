"""Read requests of OpenAI's Responses API, and write the replies, independently of any server.

A request becomes the `ChatRequest` that the same conversation is in the form of chat completions, so an episode has
the same tokens in both. As there, the job decides how it samples. Nothing is stored: each request has the whole
conversation as its input."""

from __future__ import annotations

import json
import time
import uuid
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
from megarl.episodes.chat_requests import (
    LARGEST_NUMBER,
    MODEL,
    ROLES,
    ChatRequest,
    check_last_message,
    role_of,
)

_TEXTS = ("input_text", "output_text", "text")


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Item(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    content: str | list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[_Part] | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    model: str
    input: str | list[_Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None


_DECODER = msgspec.json.Decoder(_Body)


def read_responses_request(data: bytes, takes_tools: bool = False) -> ChatRequest:
    """Return the request in the body of a POST. Raises: BadRequest with the reason and the field.

    Args:
        takes_tools: whether the job finds tool calls in answers."""
    body = decode(_DECODER, data, "a request of the Responses API")
    stored = "nothing is stored: send the whole conversation as input"
    refuse_unsupported(
        (
            ("previous_response_id", body.previous_response_id, stored),
            ("conversation", body.conversation, stored),
            ("prompt", body.prompt, stored),
            ("background", body.background, "an answer is the reply to its request"),
            ("top_logprobs", body.top_logprobs, "log-probs are recorded by the job and are not returned"),
        )
    )
    refuse_other_answers(data)
    limit = body.max_output_tokens
    if limit is not None and not 1 <= limit <= LARGEST_NUMBER:
        raise BadRequest(
            "max_output_tokens must be a positive number of 31 bits at most", param="max_output_tokens"
        )
    allows_calls = wants_calls(body.tool_choice, bool(body.tools))
    tools = _tools(body.tools or [], takes_tools, allows_calls)
    messages = _messages(body)
    check_last_message(messages)
    return ChatRequest(
        messages,
        limit,
        bool(body.stream),
        tools=tools,
        wants_calls=allows_calls,
        is_single_call=body.parallel_tool_calls is False,
        how=how_of(body.stop, (body.text or {}).get("format"), "text.format"),
    )


def _tools(given: list[_Tool], takes_tools: bool, wants_calls: bool) -> list[Tool]:
    """Return the tools in the form of chat completions, which chat templates read. Raises: BadRequest for a
    tool that the server would have to run."""
    found: list[Tool] = []
    names = []
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if tool.type != "function" or tool.name is None:
            raise BadRequest(
                f"{where} must have the type function and a name: the endpoint runs no tools of its own",
                "unsupported_value",
                where,
            )
        refuse_unstorable(tool.parameters, where)
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        given_fields = {name: value for name, value in function.items() if value is not None}
        found.append({"type": "function", "function": given_fields})
        names.append(tool.name)
    tool_problem(names, takes_tools, wants_calls)
    return found


def _messages(body: _Body) -> list[Message]:
    """Return the conversation as chat templates read it. Raises: BadRequest for a malformed item.

    The items of one answer, text and calls, are one message."""
    found: list[Message] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    is_answer = False
    """Whether the last item is part of an answer of the model."""
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if item.type == "reasoning":  # clients may send it back; it is not part of the conversation's text
            continue
        if item.type == "function_call":
            if not is_answer:
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(_call(item, where))
            is_answer = True
        elif item.type == "function_call_output":
            if item.call_id is None:
                raise BadRequest(f"{where}.call_id is missing", "missing_required_parameter", where)
            text = _text(item.output, f"{where}.output")
            found.append({"role": "tool", "content": text, "tool_call_id": item.call_id})
            is_answer = False
        elif item.type in (None, "message"):
            found.append(_message(item, where))
            is_answer = item.role == "assistant"
        else:
            raise BadRequest(
                f"{where}.type ({item.type[:80]}) must be message, function_call, function_call_output or reasoning",
                "unsupported_value",
                where,
            )
    return found


def _message(item: _Item, where: str) -> Message:
    if item.role not in ROLES or item.role == "tool":
        roles = ", ".join(role for role in ROLES if role != "tool")
        raise BadRequest(f"{where}.role must be one of {roles}: {str(item.role)[:80]!r}", param=where)
    return {"role": role_of(item.role), "content": _text(item.content, f"{where}.content")}


def _call(item: _Item, where: str) -> dict[str, Any]:
    if item.call_id is None or item.name is None or item.arguments is None:
        raise BadRequest(
            f"{where} must have call_id, name and arguments", "missing_required_parameter", where
        )
    return called(item.call_id, item.name, read_arguments(item.arguments, where))


def _text(given: str | list[_Part] | None, where: str) -> str:
    """Return the text of a string or of a list of text parts. Raises: BadRequest for a part of another
    type."""
    if given is None:
        raise BadRequest(f"{where} is missing", "missing_required_parameter", where)
    if isinstance(given, str):
        return given
    for at, part in enumerate(given):
        if part.type not in _TEXTS or part.text is None:
            raise BadRequest(
                f"{where}[{at}] must be a part with type input_text or output_text and a text: other parts are not "
                "supported",
                "unsupported_value",
                f"{where}[{at}]",
            )
    return "".join(part.text or "" for part in given)


def responses_body(completion: Completion) -> dict[str, Any]:
    """Return an answer as the JSON object with which the Responses API replies."""
    return _response(_head(), completion)


def responses_events(completion: Completion) -> bytes:
    """Return an answer as the server-sent events with which the Responses API streams it."""
    head = _head()
    response = _response(head, completion)
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        events += _events_of_item(item, index)
    end = "response.incomplete" if completion.usage.is_cut else "response.completed"
    events.append({"type": end, "response": response})
    lines = (json.dumps({**event, "sequence_number": number}) for number, event in enumerate(events))
    names = (event["type"] for event in events)
    return "".join(f"event: {name}\ndata: {line}\n\n" for name, line in zip(names, lines)).encode()


def _events_of_item(item: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """Return the events that stream one item of the output."""
    where = {"output_index": index, "item_id": item["id"]}
    inner: list[dict[str, Any]] = []
    empty = item
    if item["type"] == "message":
        part, at = item["content"][0], {**where, "content_index": 0}
        empty = {**item, "status": "in_progress", "content": []}
        inner = [
            {**at, "type": "response.content_part.added", "part": {**part, "text": ""}},
            {**at, "type": "response.output_text.delta", "delta": part["text"], "logprobs": []},
            {**at, "type": "response.output_text.done", "text": part["text"], "logprobs": []},
            {**at, "type": "response.content_part.done", "part": part},
        ]
    elif item["type"] == "function_call":
        empty = {**item, "status": "in_progress", "arguments": ""}
        arguments, kind = item["arguments"], "response.function_call_arguments"
        inner = [
            {**where, "type": f"{kind}.delta", "delta": arguments},
            {**where, "type": f"{kind}.done", "arguments": arguments, "name": item["name"]},
        ]
    return [
        {"type": "response.output_item.added", "output_index": index, "item": empty},
        *inner,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _head() -> dict[str, Any]:
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _response(head: dict[str, Any], completion: Completion) -> dict[str, Any]:
    is_cut, usage = completion.usage.is_cut, completion.usage
    return {
        **head,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(completion),
        "usage": {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt + usage.num_sampled,
        },
    }


def _output(completion: Completion) -> list[dict[str, Any]]:
    """Return the items of an answer: reasoning, text, calls."""
    items: list[dict[str, Any]] = []
    status = "incomplete" if completion.usage.is_cut else "completed"
    if completion.reasoning is not None:
        content = [{"type": "reasoning_text", "text": completion.reasoning}]
        items.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": content})
    if completion.text or not completion.tool_calls:
        part = {"type": "output_text", "text": completion.text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": _id("msg"), "role": "assistant", "status": status}
        items.append({**head, "content": [part]})
    for call in completion.tool_calls:
        head = {"type": "function_call", "id": _id("fc"), "call_id": call.id, "status": status}
        items.append({**head, "name": call.name, "arguments": call.arguments})
    return items


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"

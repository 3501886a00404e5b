"""Anthropic's dialect at the endpoint of agents: its SDK, streamed or not, with tools; the same conversations
as in OpenAI's dialect; mutated requests.

pytest tests/episodes/test_anthropic.py"""

from __future__ import annotations

import http.client
import json
import random

import pytest

from megarl.episodes.anthropic_requests import read_messages_request
from megarl.episodes.bad_request import BadRequest
from megarl.episodes.chat_requests import read_chat_request
from tests.episodes.mutations import mutated, variant
from tests.episodes.test_proxy import HI, Answering
from tests.episodes.test_tool_calls import Calling

TOOLS = [
    {"name": name, "description": "Works.", "input_schema": {"type": "object", "properties": {"a": {}}}}
    for name in ("add", "find")
]


def ask(messages, **how) -> dict:
    return {"model": "m", "max_tokens": 9, "messages": messages, **how}


def post(server, body, key=None, path="/v1/messages", **headers) -> tuple[int, dict | bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.proxy.port, timeout=20)
    connection.request("POST", path, data, {"x-api-key": key or server.key} | headers)
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, json.loads(text) if reply.headers.get_content_subtype() == "json" else text


@pytest.fixture(params=[Answering])
def server(request):
    made = request.param()
    yield made
    made.proxy.stop()


def client_of(server, monkeypatch, **how):
    import anthropic  # 2 s, which only the worker that runs this file shall take

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    url = server.proxy.url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key=server.key, max_retries=0, **how)


def test_the_sdk_talks_streams_and_retries(server, monkeypatch):
    """Each request hands only its new messages on. An impatient SDK gets the first request's answer."""
    client = client_of(server, monkeypatch)
    assert [model.id for model in client.models.list()] == ["policy"]
    first = client.messages.create(model="m", system="be kind", messages=HI, max_tokens=7)
    assert ([block.text for block in first.content], first.stop_reason) == ([" é2 "], "end_turn")
    assert (first.usage.input_tokens, first.usage.output_tokens) == (5, 2)
    spoken = [*HI, {"role": "assistant", "content": [block.to_dict() for block in first.content]}, *HI]
    with client.messages.stream(model="m", system="be kind", messages=spoken, max_tokens=7) as events:
        assert "".join(events.text_stream) == " é1 "
        assert events.get_final_message().usage.output_tokens == 2
    blocks = [
        {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "c"},
    ]
    spoken += [{"role": "assistant", "content": "é1"}, {"role": "user", "content": blocks}]
    server.delay_s = 1.0
    patient = client.with_options(timeout=0.4, max_retries=5)
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]
    answer = patient.messages.create(model="m", system=system, messages=spoken, max_tokens=7)
    assert answer.content[0].text == " é1 "
    assert server.requests == [
        (0, [{"role": "system", "content": "be kind"}, *HI], 7),
        (0, HI, 7),
        (0, [{"role": "user", "content": "bc"}], 7),
    ]


@pytest.mark.parametrize("server", [Calling], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_calls_tools(server, monkeypatch, stream):
    client = client_of(server, monkeypatch)
    how = {"model": "m", "tools": TOOLS, "tool_choice": {"type": "auto"}, "max_tokens": 7}
    if stream:
        with client.messages.stream(messages=HI, **how) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(messages=HI, **how)
    thinking, *calls = message.content
    assert (thinking.type, thinking.thinking, message.stop_reason) == ("thinking", "I think", "tool_use")
    found = [(call.type, call.id, call.name, call.input) for call in calls]
    assert found == [
        ("tool_use", "call00000", "add", {"a": 1}),
        ("tool_use", "call00001", "find", {"b": "é"}),
    ]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": calls[1].id, "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    echoed = {"role": "assistant", "content": [block.to_dict() for block in message.content]}
    spoken = [*HI, echoed, {"role": "user", "content": results}]
    last = client.messages.create(messages=spoken, **{**how, "tool_choice": {"type": "none"}})
    assert [(block.type, block.text) for block in last.content] == [("text", "done")]
    (_, first, asked), (_, second, later) = server.requests
    assert first == HI and (asked.wants_calls, later.wants_calls) == (True, False)
    assert second == [
        {"role": "tool", "content": "2", "tool_call_id": "call00000"},
        {"role": "tool", "content": "", "tool_call_id": "call00001"},
        {"role": "user", "content": "go on"},
    ]


def test_a_conversation_is_the_same_in_both_dialects():
    arguments = {"a": [1, {"é": None}]}
    ours = read_messages_request(
        json.dumps(
            ask(
                [
                    *HI,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "text", "text": "so"},
                            {"type": "tool_use", "id": "c1", "name": "add", "input": arguments},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}],
                    },
                ],
                system="s",
                tools=TOOLS,
                tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            )
        ).encode(),
        takes_tools=True,
    )
    function = {"name": "add", "arguments": json.dumps(arguments)}
    theirs = read_chat_request(
        json.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": "s"},
                    *HI,
                    {
                        "role": "assistant",
                        "content": "so",
                        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "3"},
                ],
                "max_tokens": 9,
                "parallel_tool_calls": False,
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": tool["name"],
                            "description": tool["description"],
                            "parameters": tool["input_schema"],
                        },
                    }
                    for tool in TOOLS
                ],
            }
        ).encode(),
        takes_tools=True,
    )
    assert ours == theirs


def user(*blocks) -> list[dict]:
    return [{"role": "user", "content": [*blocks]}]


DEEP = json.loads('{"a":' * 100 + "1" + "}" * 100)
REFUSED = {
    "no limit": ({"model": "m", "messages": HI}, "missing required field `max_tokens`"),
    "no tokens": (ask(HI, max_tokens=0), "max_tokens must be a positive number"),
    "no messages": (ask([]), "messages is empty"),
    "no blocks": (ask(user()), "messages[0].content is empty"),
    "a system role": (
        ask([{"role": "system", "content": "x"}]),
        "messages[0].role must be user or assistant",
    ),
    "an empty stop sequence": (ask(HI, stop_sequences=["x", ""]), "a stop string must not be empty"),
    "a grammar": (ask(HI, output_format={"type": "json_schema"}), "response_format must be text"),
    "a grammar of the SDK": (
        ask(HI, output_config={"format": {"type": "json_schema", "schema": 3}}),
        "response_format must be text",
    ),
    "a picture": (ask(user({"type": "image"})), "messages[0].content[0] has a block of type 'image'"),
    "a picture in a result": (
        ask(user({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]})),
        "messages[0].content[0] has a block of type 'image'",
    ),
    "a result of nothing": (ask(user({"type": "tool_result"})), "tool_use_id is missing"),
    "a begun answer": (
        ask([*HI, {"role": "assistant", "content": "I"}]),
        "the last message is the assistant's",
    ),
    "a call without a name": (
        ask([*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "input": {}}]}, *HI]),
        "messages[1].content[0] must have id, name and input",
    ),
    "tools without a parser": (ask(HI, tools=TOOLS), "this job finds no tool calls in answers"),
    "a tool of theirs": (
        ask(HI, tools=[{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]),
        "tools[0].type (web_search_20250305) must be custom",
    ),
    "a deep tool": (
        ask(HI, tools=[{"name": "x", "input_schema": DEEP}]),
        "tools[0] is nested deeper than 64",
    ),
    "no JSON": (b"{", "the body is not JSON"),
    "depth": (b"[" * 100_000, "the request is not"),
}


def test_requests_are_refused_by_name(server):
    assert post(server, ask(HI, output_config={"format": None, "effort": "low"}))[0] == 200
    for name, (body, wanted) in REFUSED.items():
        status, reply = post(server, body)
        assert status == 400 and reply["type"] == "error", (name, reply)
        assert reply["error"]["type"] == "invalid_request_error" and wanted in reply["error"]["message"], name
    status, reply = post(server, ask(HI), key="other")
    assert (status, reply["error"]["type"]) == (401, "authentication_error")
    status, reply = post(server, ask(HI), path="/v1/messages/count_tokens")
    assert (status, reply["error"]["type"]) == (404, "not_found_error")
    status, reply = post(server, b" " * ((16 << 20) + 1))
    assert (status, reply["error"]["type"]) == (413, "request_too_large")
    assert len(server.requests) == 1


def test_the_sdk_raises_what_it_raises_for_its_own_server(server, monkeypatch):
    import anthropic

    client = client_of(server, monkeypatch)
    server.delay_s = None
    server.proxy.refuse(0, 0, BadRequest("full", "context_length_exceeded"), is_final=True)
    with pytest.raises(anthropic.BadRequestError, match="context_length_exceeded: full"):
        client.messages.create(model="m", messages=HI, max_tokens=7)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="other").messages.create(model="m", messages=HI, max_tokens=7)


CALL = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
VALID = ask(
    [
        *HI,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}, CALL]},
        *user({"type": "tool_result", "tool_use_id": "c", "content": "é"}, {"type": "text", "text": "x"}),
    ],
    **{"system": "s", "stream": False, "temperature": 0.5, "tools": TOOLS, "tool_choice": {"type": "auto"}},
)


@pytest.mark.parametrize("server", [Calling], indirect=True)
@pytest.mark.parametrize(
    "count", [300, pytest.param(6300, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])]
)
def test_mutated_requests_are_answered_or_refused_with_a_reason(server, count):
    """Every mutant has an episode of its own. A bystander's conversation goes on unharmed."""
    rng, statuses = random.Random(0), []
    assert post(server, ask(HI))[0] == 200
    for episode in range(1, count):
        is_valid = rng.random() < 0.2
        data = variant(rng, VALID) if is_valid else mutated(rng, VALID)
        status, reply = post(server, data, server.proxy.open(episode))
        assert status == 200 or not is_valid, (data, reply)
        statuses.append(status)
        if status == 200:
            assert b"event: message_stop" in reply if isinstance(reply, bytes) else reply["content"]
        else:
            assert 400 <= status < 500 and reply["type"] == "error" and reply["error"]["message"], reply
            assert server.key not in json.dumps(reply)
        server.proxy.close(episode)
    assert min(statuses.count(200), statuses.count(400)) > count / 20, statuses
    assert set(server.proxy._conversations) == {server.key} and set(server.proxy._key_of) == {0}

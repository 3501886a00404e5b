"""OpenAI's Responses API at the endpoint of agents: its SDK, streamed or not, with tools; the same
conversations as in chat completions; mutated requests.

pytest tests/episodes/test_responses.py"""

from __future__ import annotations

import json
import random

import pytest

from megarl.episodes.answers import Completion
from megarl.episodes.chat_requests import read_chat_request
from megarl.episodes.environments import Usage
from megarl.episodes.responses_requests import read_responses_request, responses_body, responses_events
from tests.episodes.test_anthropic import post as post_to
from tests.episodes.mutations import mutated, variant
from tests.episodes.test_proxy import HI, Answering, client_of
from tests.episodes.test_tool_calls import TOOLS as CHAT_TOOLS
from tests.episodes.test_tool_calls import Calling

# `strict` is not shown to the model.
TOOLS = [{"type": "function", "strict": False, **tool["function"]} for tool in CHAT_TOOLS]
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": [1, {"é": null}]}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def ask(given, **how) -> dict:
    return {"model": "m", "input": given, **how}


def post(server, body, key=None):
    return post_to(server, body, key, path="/v1/responses")


@pytest.fixture(params=[Answering])
def server(request):
    made = request.param()
    yield made
    made.proxy.stop()


def test_the_sdk_talks_streams_and_retries(server, monkeypatch):
    client = client_of(server, monkeypatch)
    first = client.responses.create(model="m", instructions="be kind", input="hi", max_output_tokens=7)
    assert (first.output_text, first.status) == (" é2 ", "completed")
    assert (first.usage.input_tokens, first.usage.output_tokens, first.usage.total_tokens) == (5, 2, 7)
    spoken = [*HI, *(item.to_dict() for item in first.output), *HI]
    with client.responses.stream(model="m", instructions="be kind", input=spoken) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert deltas == [" é1 "] and events.get_final_response().output_text == " é1 "
    parts = [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]
    spoken += [{"role": "assistant", "content": "é1"}, {"type": "message", "role": "user", "content": parts}]
    server.delay_s = 1.0
    patient = client.with_options(timeout=0.4, max_retries=5)
    assert patient.responses.create(model="m", instructions="be kind", input=spoken).output_text == " é1 "
    assert server.requests == [
        (0, [{"role": "system", "content": "be kind"}, *HI], 7),
        (0, HI, None),
        (0, [{"role": "user", "content": "bc"}], None),
    ]


@pytest.mark.parametrize("server", [Calling], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_calls_tools(server, monkeypatch, stream):
    client = client_of(server, monkeypatch)
    how = {"model": "m", "tools": TOOLS}
    if stream:
        with client.responses.stream(input=HI, **how) as events:
            answer = events.get_final_response()
    else:
        answer = client.responses.create(input=HI, **how)
    reasoning, *calls = answer.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == "I think"
    assert [(call.type, call.call_id, call.name, call.arguments) for call in calls] == [
        ("function_call", "call00000", "add", '{"a": 1}'),
        ("function_call", "call00001", "find", '{"b": "é"}'),
    ]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in calls]
    spoken = [*HI, *(item.to_dict() for item in answer.output), *results]
    last = client.responses.create(input=spoken, **how, tool_choice="none")
    assert [item.type for item in last.output] == ["message"] and last.output_text == "done"
    (_, first, asked), (_, second, later) = server.requests
    assert first == HI and (asked.wants_calls, later.wants_calls) == (True, False)
    assert second == [
        {"role": "tool", "content": "2", "tool_call_id": f"call0000{number}"} for number in (0, 1)
    ]


def test_a_cut_answer_says_so():
    cut = Completion("a", Usage(5, 2, is_cut=True))
    assert responses_body(cut)["incomplete_details"] == {"reason": "max_output_tokens"}
    assert b"event: response.incomplete" in responses_events(cut)


def test_a_conversation_is_the_same_in_both_forms():
    spoken = [
        *HI,
        {"type": "reasoning", "id": "rs", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        CALL,
        {**CALL, "call_id": "c2"},
        OUTPUT,
        {**OUTPUT, "call_id": "c2"},
    ]
    how = {"tools": TOOLS, "parallel_tool_calls": False, "max_output_tokens": 9, "instructions": "s"}
    ours = read_responses_request(json.dumps(ask(spoken, **how)).encode(), takes_tools=True)
    function = {"name": "add", "arguments": CALL["arguments"]}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            *HI,
            {"role": "assistant", "content": "so", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": name, "content": "3"} for name in ("c1", "c2")),
        ],
        "max_tokens": 9,
        "parallel_tool_calls": False,
        "tools": CHAT_TOOLS,
    }
    assert ours == read_chat_request(json.dumps(body).encode(), takes_tools=True)


DEEP = json.loads('{"a":' * 100 + "1" + "}" * 100)
REFUSED = {
    "no input": ({"model": "m"}, "missing required field `input`"),
    "no items": (ask([]), "messages is empty"),
    "no tokens": (ask("hi", max_output_tokens=0), "max_output_tokens must be a positive number"),
    "a stored one": (
        ask("hi", previous_response_id="r"),
        "previous_response_id is not supported: nothing is stored",
    ),
    "a conversation": (ask("hi", conversation="c"), "conversation is not supported"),
    "in the background": (ask("hi", background=True), "background is not supported"),
    "a grammar": (
        ask("hi", text={"format": {"type": "json_schema"}}),
        "text.format must be text, json_object, or json_schema with a schema",
    ),
    "log-probs": (ask("hi", top_logprobs=3), "top_logprobs is not supported"),
    "a tool's role": (ask([{"role": "tool", "content": "x"}]), "input[0].role must be one of system,"),
    "no role": (ask([{"content": "x"}]), "input[0].role must be one of"),
    "no content": (ask([{"role": "user"}]), "input[0].content is missing"),
    "a picture": (
        ask([{"role": "user", "content": [{"type": "input_image"}]}]),
        "input[0].content[0] must be a part with type input_text",
    ),
    "another item": (ask([{"type": "computer_call"}]), "input[0].type (computer_call) must be message"),
    "a call without a name": (ask([*HI, {**CALL, "name": None}, OUTPUT]), "input[1] must have call_id, name"),
    "arguments that are none": (ask([*HI, {**CALL, "arguments": "["}, OUTPUT]), "must be a JSON object"),
    "an output of nothing": (ask([*HI, CALL, {**OUTPUT, "call_id": None}]), "input[2].call_id is missing"),
    "a begun answer": (
        ask([*HI, {"role": "assistant", "content": "I"}]),
        "the last message is the assistant's",
    ),
    "a tool of theirs": (ask("hi", tools=[{"type": "web_search"}]), "tools[0] must have the type function"),
    "a deep tool": (
        ask("hi", tools=[{"type": "function", "name": "x", "parameters": DEEP}]),
        "nested deeper",
    ),
    "tools without a parser": (ask("hi", tools=TOOLS), "this job finds no tool calls in answers"),
    "no JSON": (b"{", "the body is not JSON"),
}


def test_requests_are_refused_by_name(server):
    assert post(server, ask("hi"))[0] == 200
    for name, (body, wanted) in REFUSED.items():
        status, reply = post(server, body)
        assert status == 400 and wanted in reply["error"]["message"], (name, reply)
        assert reply["error"]["type"] == "invalid_request_error", name
    assert post(server, ask("hi"), key="other")[0] == 401
    assert len(server.requests) == 1


VALID = ask(
    [*HI, {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]}, CALL, OUTPUT, *HI],
    **{"instructions": "s", "stream": False, "temperature": 0.5, "tools": TOOLS, "tool_choice": "auto"},
)


@pytest.mark.parametrize("server", [Calling], indirect=True)
@pytest.mark.parametrize(
    "count", [300, pytest.param(6300, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])]
)
def test_mutated_requests_are_answered_or_refused_with_a_reason(server, count):
    """Every mutant has an episode of its own."""
    rng, statuses = random.Random(0), []
    for episode in range(1, count):
        is_valid = rng.random() < 0.2
        data = variant(rng, VALID) if is_valid else mutated(rng, VALID)
        status, reply = post(server, data, server.proxy.open(episode))
        assert status == 200 or not is_valid, (data, reply)
        statuses.append(status)
        if status == 200:
            assert b"event: response.completed" in reply if isinstance(reply, bytes) else reply["output"]
        else:
            assert 400 <= status < 500 and reply["error"]["message"], reply
            assert server.key not in json.dumps(reply)
        server.proxy.close(episode)
    assert min(statuses.count(200), statuses.count(400)) > count / 20, statuses

"""The endpoint of agents over real connections: OpenAI's SDK, retries, keys, and mutated requests.

pytest tests/episodes/test_proxy.py"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator

import pytest

from megarl.episodes.answers import Completion
from megarl.episodes.bad_request import BadRequest
from megarl.episodes.chat_requests import read_chat_request
from megarl.episodes.environments import Usage
from megarl.episodes.proxy import Proxy
from megarl.episodes.responses_requests import read_responses_request
from tests.episodes.mutations import mutated, variant

RULE = [{"role": "developer", "content": "be brief"}]  # templates know it as system
HI = [{"role": "user", "content": "hi"}]
USAGE = Usage(num_prompt=5, num_sampled=2, is_cut=False)


class Answering:
    """Answers every request with the number of messages that it added, after a delay."""

    takes_tools = False

    def __init__(self) -> None:
        self.requests: list[tuple[int, list, int | None]] = []
        self.places: list[tuple[int | None, int]] = []  # parent and number of answers of each request
        self.num_turns = 0
        self.delay_s: float | None = 0.0  # None: no answer
        self.proxy = Proxy(self._on_request, max_length=64, takes_tools=self.takes_tools)
        self.key = self.proxy.open(0)

    def _on_request(self, episode, messages, asked, request):
        self.requests.append((episode, messages, asked.max_tokens))
        self.places.append((request.parent, request.count))
        first, self.num_turns = self.num_turns, self.num_turns + request.count
        text = f" é{len(messages)} "
        completions = [
            (first + n, Completion(text + f"{n}" * (request.count > 1), USAGE)) for n in range(request.count)
        ]
        if self.delay_s is None:
            return
        reply = episode, request.number, completions
        if self.delay_s:
            threading.Timer(self.delay_s, self.proxy.answer, reply).start()
        else:
            self.proxy.answer(*reply)

    def post(self, body: object, key: str | None = None, **headers: str) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=20)
        given = {"Authorization": f"Bearer {key or self.key}"} | headers
        connection.request("POST", "/v1/chat/completions", data, given)
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        return reply.status, json.loads(text) if reply.headers.get_content_subtype() == "json" else text


@pytest.fixture
def server() -> Iterator[Answering]:
    made = Answering()
    yield made
    made.proxy.stop()
    assert not made.proxy._thread.is_alive()


def client_of(server, monkeypatch):
    import openai  # 2 s, which only the worker that runs this file shall take

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return openai.OpenAI(base_url=server.proxy.url, api_key=server.key, max_retries=0)


def ask(messages, **how) -> dict:
    return {"model": "m", "messages": messages, **how}


def test_the_sdk_talks_streams_and_retries(server, monkeypatch):
    """Each request hands only its new messages on. An impatient SDK gets the first request's answer."""
    client = client_of(server, monkeypatch)
    assert [model.id for model in client.models.list()] == ["policy"]
    first = client.chat.completions.create(model="m", messages=HI, max_tokens=7, temperature=0.2)
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == (" é1 ", "stop")
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.total_tokens) == (5, 2, 7)
    messages = [
        *HI,
        first.choices[0].message.to_dict(),
        {"role": "tool", "content": "a", "tool_call_id": "1"},
    ]
    how = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model="m", messages=messages, **how)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " é1 "
    assert chunks[-1].choices[0].finish_reason == "stop" and last.usage.total_tokens == 7
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages += [{"role": "assistant", "content": "é1"}, *RULE, {"role": "user", "content": parts}]
    server.delay_s = 1.0
    patient = client.with_options(timeout=0.4, max_retries=5)
    assert patient.chat.completions.create(model="m", messages=messages).choices[0].message.content == " é2 "
    assert server.requests == [
        (0, HI, 7),
        (0, [{"role": "tool", "content": "a", "tool_call_id": "1"}], None),
        (0, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "bc"}], None),
    ]
    assert server.places == [(None, 1), (0, 1), (1, 1)]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"], ids=["IPv4", "IPv6"])
def test_the_address_is_one_that_http_clients_read(host):
    import httpx

    try:
        proxy = Proxy(lambda *asked: None, 64, host)
    except RuntimeError as error:
        pytest.skip(f"without IPv6: {error}")
    try:
        url = httpx.URL(proxy.url)
        assert (url.host, url.port, url.path) == (host, proxy.port, "/v1")
        key = {"Authorization": f"Bearer {proxy.open(0)}"}
        assert httpx.get(f"{proxy.url}/models", headers=key, trust_env=False).status_code == 200
    finally:
        proxy.stop()


def test_a_key_is_good_for_its_open_episode_only(server):
    other = server.proxy.open(1)
    assert server.post(ask(HI), other)[0] == 200 and server.requests[-1][0] == 1
    for key in ("wrong", other[:-1], other + "x", "é".encode().decode("latin-1")):
        status, body = server.post(ask(HI), key)
        assert status == 401 and body["error"]["code"] == "invalid_api_key", key
    server.proxy.close(1)
    assert server.post(ask(HI), other)[0] == 401 and server.post(ask(HI))[0] == 200
    server.delay_s, waiting = None, server.proxy.open(2)
    threading.Timer(0.3, server.proxy.close, (2,)).start()
    status, body = server.post(ask(HI), waiting)  # which the server itself never answers
    assert (status, body["error"]["code"]) == (400, "episode_ended")


RETRY = {"x-stainless-retry-count": "1"}
REFUSED = {
    "n": (ask(HI, n=0), {}, "n (0) must be from 1 to 4096"),
    "a larger n": (ask(HI, n=4097), {}, "n (4097) must be from 1 to 4096"),
    "nothing new": (ask([*HI, {"role": "assistant", "content": "é1"}]), {}, "is the assistant's"),
    "tools": (ask(HI, tools=[{}]), {}, "tools[0].type must be function"),
    "tools without a parser": (
        ask(HI, tools=[{"type": "function", "function": {"name": "add"}}]),
        {},
        "this job finds no tool calls in answers. Give it --tool-call-parser",
    ),
    "an empty stop string": (ask(HI, stop=["x", ""]), {}, "a stop string must not be empty"),
    "a picture": (
        ask([{"role": "user", "content": [{"type": "image_url"}]}]),
        {},
        "messages[0].content[0] must be a part with type text",
    ),
    "no role": (ask([{"role": "root", "content": "x"}]), {}, "messages[0].role must be one of"),
    "no content": (ask([{"role": "user"}]), {}, "messages[0].content is missing"),
    "no tokens": (ask(HI, max_tokens=0), {}, "max_tokens must be a positive number"),
    "depth": (b"[" * 100_000, {}, "the request is not"),
    "a depth inside": (b'{"tool_choice":' + b"[" * 100_000, {}, "the body is not JSON"),
    "no number": (ask(HI), {"x-stainless-retry-count": "x"}, "is not a number"),
    "a long number": (ask(HI), {"x-stainless-retry-count": "9" * 5000}, "is not a number"),
    "a long body": (b" " * ((16 << 20) + 1), {}, "the body is longer than"),
}


OTHER_ANSWERS = {
    "allowed_token_ids": [3],
    "bad_words": ["x"],
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "frequency_penalty": 0.5,
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= x",
    "guided_json": {"type": "object"},
    "guided_regex": "x*",
    "ignore_eos": True,
    "logit_bias": {"3": -100},
    "min_tokens": 3,
    "presence_penalty": -1,
    "repetition_penalty": 1.1,
    "stop_token_ids": [3],
    "structured_outputs": {"json": {"type": "object"}},
    "use_beam_search": True,
}
"""Fields that ask for another answer than the job's."""
NEUTRAL = {
    **dict.fromkeys(("bad_words", "stop", "stop_token_ids"), []),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), {}),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens"), 0),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "continue_final_message"), False),
    "repetition_penalty": 1.0,
}
"""Their values that change nothing, besides null."""


@pytest.mark.parametrize(
    "read, body",
    [(read_chat_request, ask(HI)), (read_responses_request, {"model": "m", "input": HI})],
    ids=["chat", "responses"],
)
def test_fields_that_ask_for_another_answer_are_refused(read, body):
    def asked(**fields):
        return read(json.dumps({**body, **fields}).encode())

    plain = asked()
    for name, value in OTHER_ANSWERS.items():
        with pytest.raises(BadRequest, match=f"^{name} is not supported: ") as error:
            asked(**{name: value})
        assert (error.value.status, error.value.param) == (400, name)
        assert asked(**{name: None}) == asked(**{name: NEUTRAL.get(name)}) == plain
    assert asked(**NEUTRAL) == plain
    with pytest.raises(BadRequest, match="^the body is not JSON: "):
        read(json.dumps(body).encode()[:-1] + b', "logit_bias":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_requests_are_refused_by_name(server):
    assert server.post(ask(HI))[0] == 200
    for name, (body, headers, wanted) in REFUSED.items():
        status, reply = server.post(body, **headers)
        assert status == (413 if name == "a long body" else 400), (name, reply)
        assert wanted in reply["error"]["message"] and reply["error"]["type"] == "invalid_request_error", name
    assert server.post(ask(HI), **RETRY)[1]["choices"][0]["message"]["content"] == " é1 "
    assert len(server.requests) == 1
    server.delay_s = None
    full = threading.Timer(
        0.2, server.proxy.refuse, (0, 1, BadRequest("full", "context_length_exceeded"), True)
    )
    full.start()
    assert server.post(ask(HI))[1]["error"]["message"] == "full"
    status, reply = server.post(ask(HI))
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


def said(text: str, *more: dict) -> list[dict]:
    return [*HI, {"role": "assistant", "content": text}, *more]


def test_every_request_continues_the_longest_conversation_that_it_repeats(server):
    """The numbers of the turns are those that the server gives its answers, from 0 on."""
    tool = {"type": "function", "function": {"name": "add"}}
    ho, more = {"role": "user", "content": "ho"}, {"role": "user", "content": "more"}
    for body, place, new in (
        (ask(HI), (None, 1), HI),  # 0
        (ask(said("é1", ho)), (0, 1), [ho]),  # 1
        (ask(HI), (None, 1), HI),  # 2: the same once more is a second draw
        (ask(said("é1", ho, {"role": "assistant", "content": "é1"}, more), n=2), (1, 2), [more]),  # 3, 4
        (ask(said("é1", more)), (2, 1), [more]),  # both answers to HI have this text: the later one counts
        (ask(said("edited", ho)), (None, 1), said("edited", ho)),
        (ask([ho, *said("é1", more)]), (None, 1), [ho, *said("é1", more)]),
        (ask(said("é1", ho), tools=[tool], tool_choice="none"), (None, 1), said("é1", ho)),
        (ask(said("é1", ho), tools=[]), (2, 1), [ho]),
    ):
        status, reply = server.post(body)
        assert status == 200, reply
        assert (server.places[-1], server.requests[-1][1]) == (place, new), body
    assert [one["message"]["content"] for one in server.post(ask(HI, n=3))[1]["choices"]] == [
        *(" é1 0", " é1 1", " é1 2")
    ]


def test_answers_to_one_request_are_streamed_side_by_side(server, monkeypatch):
    client = client_of(server, monkeypatch)
    texts, ends = {}, {}
    for chunk in client.chat.completions.create(model="m", messages=HI, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        ends[choice.index] = choice.finish_reason
    assert texts == {0: " é1 0", 1: " é1 1", 2: " é1 2"} and ends == dict.fromkeys(range(3), "stop")


def test_requests_of_one_episode_wait_side_by_side_and_retries_get_one_each(server):
    """Two equal requests whose clients lost patience, and another one. No retry asks for a new answer."""
    server.delay_s, found = 0.8, []
    for body in (ask(HI), ask(HI), ask([{"role": "user", "content": "ho"}])):
        connection = http.client.HTTPConnection("127.0.0.1", server.proxy.port, timeout=20)
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {server.key}"}
        )
        found.append(connection)
        time.sleep(0.05)
    for connection in found[:2]:
        connection.close()
    time.sleep(0.1)
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(server.post(ask(HI), **RETRY)[0])) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert found[2].getresponse().status == 200
    for thread in threads:
        thread.join()
    found[2].close()
    (conversations,) = server.proxy._conversations.values()
    assert texts == [200, 200] and len(server.requests) == 3
    assert [one.num_retries for one in conversations.requests] == [1, 1, 0]


VALID = ask(
    [{"role": "system", "content": "s"}, *HI, {"role": "user", "content": [{"type": "text", "text": "é"}]}],
    **{"max_tokens": 3, "stream": False, "n": 1, "temperature": 0.5, "stop": None, "tools": None},
)


@pytest.mark.parametrize(
    "count", [300, pytest.param(6300, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])]
)
def test_mutated_requests_are_answered_or_refused_with_a_reason(server, count):
    """Every mutant has an episode of its own. A bystander's conversation goes on unharmed."""
    rng, statuses = random.Random(0), set()
    assert server.post(ask(HI))[0] == 200
    for episode in range(1, count):
        is_valid = rng.random() < 0.2
        data = variant(rng, VALID) if is_valid else mutated(rng, VALID)
        status, reply = server.post(data, server.proxy.open(episode))
        assert status == 200 or not is_valid, (data, reply)
        statuses.add(status)
        if status == 200:
            assert b"data: [DONE]" in reply if isinstance(reply, bytes) else reply["choices"]
        else:
            assert 400 <= status < 500 and reply["error"]["message"], reply
            assert server.key not in json.dumps(reply)
        server.proxy.close(episode)
    assert {200, 400} <= statuses and 500 not in statuses
    assert set(server.proxy._conversations) == {server.key} and set(server.proxy._key_of) == {0}
    assert server.post(ask([*HI, {"role": "assistant", "content": "é1"}, *HI]))[0] == 200

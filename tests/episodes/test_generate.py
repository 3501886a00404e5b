"""The endpoint's dialect of token ids: an agent over HTTP, what is refused, and mutated requests.

pytest tests/episodes/test_generate.py"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator

import pytest

from megarl.episodes.answers import Completion
from megarl.episodes.environments import Usage
from megarl.episodes.proxy import Proxy
from tests.episodes.mutations import mutated, variant

VOCAB = 300


class Counting:
    """Answers every request for ids with 5, 6, ... as many as the prompt has."""

    def __init__(self) -> None:
        self.requests = []
        self.proxy = Proxy(self._on_request, max_length=64, vocab_size=VOCAB)
        self.key = self.proxy.open(0)

    def _on_request(self, episode, messages, asked, request):
        assert messages == [] and request.parent is None and request.token_ids == asked.token_ids
        self.requests.append((episode, asked.token_ids, asked.max_tokens, request.count))
        ids = (*range(5, 5 + len(asked.token_ids)),)
        usage = Usage(len(ids), len(ids), is_cut=asked.max_tokens == len(ids))
        made = Completion("", usage, token_ids=ids, log_probs=tuple(-i / 4 for i in ids))
        self.proxy.answer(episode, request.number, [(n, made) for n in range(request.count)])

    def post(self, body: object, key: str | None = None, **headers: str) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=20)
        given = {"Authorization": f"Bearer {key or self.key}"} | headers
        connection.request("POST", "/inference/v1/generate", data, given)
        reply = connection.getresponse()
        found = reply.status, json.loads(reply.read())
        connection.close()
        return found


@pytest.fixture
def server() -> Iterator[Counting]:
    made = Counting()
    yield made
    made.proxy.stop()


def ask(token_ids=(1, 2), **params) -> dict:
    return {"model": "policy", "token_ids": [*token_ids], "sampling_params": params}


RENDERERS = {"max_tokens": 2, "stop_token_ids": [9], "logprobs": 1, "skip_special_tokens": False}


def test_ids_and_log_probs_come_in_the_form_of_both_clients(server):
    status, reply = server.post(ask(**RENDERERS), **{"X-Session-ID": "trace"})
    (choice,) = reply["choices"]
    assert status == 200 and reply["request_id"] and choice["token_ids"] == [5, 6]
    content = choice["logprobs"]["content"]
    assert [(one["token"], one["token_id"], one["logprob"]) for one in content] == [
        ("token_id:5", 5, -1.25),
        ("token_id:6", 6, -1.5),
    ]
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    status, reply = server.post(ask([3], n=3, temperature=0.1, seed=4))
    assert [(one["index"], one["finish_reason"]) for one in reply["choices"]] == [
        (index, "stop") for index in range(3)
    ]
    retry = server.post(ask([3], n=3), **{"x-stainless-retry-count": "1"})[1]["choices"]
    assert retry == reply["choices"]
    assert server.requests == [(0, [1, 2], 2, 1), (0, [3], None, 3)]


REFUSED = {
    "no ids": (ask([]), "token_ids is empty"),
    "an id outside the vocabulary": (ask([1, VOCAB]), "token_ids[1] (300) is not in the vocabulary"),
    "a negative id": (ask([-1]), "token_ids[0] (-1) is not in the vocabulary: must be from 0 to 299"),
    "a text": ({**ask(), "token_ids": "ab"}, "is not a request for /inference/v1/generate"),
    "no parameters": ({"token_ids": [1]}, "is not a request for /inference/v1/generate"),
    "a stream": ({**ask(), "stream": True}, "stream is not supported"),
    "a picture": ({**ask(), "features": {"mm_hashes": {}}}, "features is not supported"),
    "an empty stop string": (ask(stop=["x", ""]), "a stop string must not be empty"),
    "a mask": (ask(allowed_token_ids=[1]), "allowed_token_ids is not supported"),
    "more log-probs": (ask(logprobs=5), "logprobs (5) must be 0 or 1"),
    "of the prompt": (ask(prompt_logprobs=1), "prompt_logprobs is not supported"),
    "no tokens": (ask(max_tokens=0), "max_tokens must be a positive number"),
    "no answers": (ask(n=0), "n (0) must be from 1 to 4096"),
    "depth": (b"[" * 100_000, "the request is not"),
}


def test_requests_are_refused_by_name(server):
    for name, (body, wanted) in REFUSED.items():
        status, reply = server.post(body)
        assert status == 400 and wanted in reply["error"]["message"], (name, reply)
    assert server.post(ask(), key="other")[0] == 401 and not server.requests


@pytest.mark.parametrize(
    "count", [300, pytest.param(6300, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])]
)
def test_mutated_requests_are_answered_or_refused_with_a_reason(server, count):
    rng, statuses = random.Random(0), []
    valid = ask([3, 1, 4, 1, 5], **RENDERERS, n=1, temperature=1.0)
    for episode in range(1, count):
        is_valid = rng.random() < 0.2
        data = variant(rng, valid) if is_valid else mutated(rng, valid)
        status, reply = server.post(data, server.proxy.open(episode))
        assert status == 200 or not is_valid, (data, reply)
        statuses.append(status)
        if status == 200:
            assert all(0 <= token < VOCAB for token in server.requests[-1][1]) and reply["choices"]
        else:
            assert 400 <= status < 500 and reply["error"]["message"], reply
            assert server.key not in json.dumps(reply)
        server.proxy.close(episode)
    assert min(statuses.count(200), statuses.count(400)) > count / 20, statuses
    assert set(server.proxy._key_of) == {0}

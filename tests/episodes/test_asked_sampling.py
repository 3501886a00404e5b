"""Agents say where answers end and which form they have: what is honoured, what they see, and what is trained on.

pytest tests/episodes/test_asked_sampling.py"""

from __future__ import annotations

import json
import random
import shlex
import sys

import pytest

from megarl.episodes import bad_request
from megarl.episodes.agent_pool import AgentPool
from megarl.episodes.anthropic_requests import messages_body, read_messages_request
from megarl.episodes.answers import Completion
from megarl.episodes.bad_request import BadRequest
from megarl.episodes.chat import Chat
from megarl.episodes.chat_requests import read_chat_request
from megarl.episodes.environments import Usage
from megarl.episodes.episode import Episode
from megarl.episodes.generate_requests import read_generate_request
from megarl.episodes.responses_requests import read_responses_request
from megarl.episodes.runner import play
from megarl.episodes.session import Session
from tests.episodes.templates import tokenizer
from tests.episodes.test_agent_pool import LIMITS
from tests.episodes.test_runner import NAME, Scripted

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}


def chat(**fields):
    return read_chat_request(json.dumps({"model": "m", "messages": HI, **fields}).encode(), takes_tools=True)


def responses(**fields):
    return read_responses_request(json.dumps({"model": "m", "input": "hi", **fields}).encode(), True)


def anthropic(**fields):
    body = {"model": "m", "messages": HI, "max_tokens": 5, **fields}
    return read_messages_request(json.dumps(body).encode(), True)


def generate(**fields):
    return read_generate_request(json.dumps({"token_ids": [1], "sampling_params": fields}).encode(), 9)


@pytest.mark.parametrize(
    ("read", "fields", "how"),
    [
        (chat, {}, {}),
        (chat, {"stop": [], "response_format": {"type": "text"}}, {}),
        (chat, {"stop": "a"}, {"stop": ["a"]}),
        (chat, {"stop": ["a", "b"], "response_format": None}, {"stop": ["a", "b"]}),
        (chat, {"response_format": {"type": "json_object"}}, {"schema": {"type": "object"}}),
        (chat, {"stop": "a", "response_format": NAMED}, {"stop": ["a"], "schema": SCHEMA}),
        (responses, {"text": {"format": FLAT, "verbosity": "low"}}, {"schema": SCHEMA}),
        (responses, {"text": {}, "stop": "a"}, {"stop": ["a"]}),
        (anthropic, {"stop_sequences": ["a"]}, {"stop": ["a"]}),
        (anthropic, {"output_config": {"format": FLAT}}, {"schema": SCHEMA}),
        (anthropic, {"output_format": FLAT}, {"schema": SCHEMA}),
        (generate, {"stop": "a"}, {"stop": ["a"]}),
        (chat, {"stop": ["a", ""]}, "must not be empty"),
        (chat, {"response_format": {"type": "structural_tag"}}, "response_format must be text, json_object"),
        (chat, {"response_format": {"type": "json_schema", "json_schema": {}}}, "with a schema"),
        (responses, {"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format must be"),
    ],
)
def test_every_dialect_says_how_it_wants_to_be_answered(read, fields, how):
    if isinstance(how, dict):
        assert read(**fields).how == how
    else:
        with pytest.raises(BadRequest, match=how):
            read(**fields)


def test_a_retry_repeats_only_a_request_that_is_sampled_alike():
    assert chat(stop="a").repeats(chat(stop=["a"], max_tokens=3, stream=True))
    assert not chat(stop="a").repeats(chat()) and not chat(response_format=NAMED).repeats(chat())


@pytest.mark.parametrize(
    ("read", "choice", "wants"),
    [
        (chat, "required", True),
        (chat, {"type": "function", "function": {"name": "add"}}, True),
        (chat, "none", False),
        (responses, "required", True),
        (responses, {"type": "function", "name": "add"}, True),
        (anthropic, {"type": "any"}, True),
        (anthropic, {"type": "tool", "name": "add"}, True),
        (anthropic, {"type": "none"}, False),
    ],
)
def test_a_forced_call_is_asked_for_as_auto_and_told_once(read, choice, wants, caplog):
    bad_request._tell_once.cache_clear()
    tool = {"name": "add", "input_schema": {}} if read is anthropic else TOOL
    tool = {"type": "function", "name": "add"} if read is responses else tool
    for _ in range(2):
        assert read(tools=[tool], tool_choice=choice).wants_calls is wants
    assert len(caplog.messages) == wants and all("taken as auto" in text for text in caplog.messages)


def test_anthropics_clients_are_told_which_text_has_ended_the_answer():
    body = messages_body(Completion("one two three", Usage(1, 1, False)).until(["three", " two"]))
    assert body["content"] == [{"type": "text", "text": "one"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", " two")


ASKS = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
messages = row["messages"]
for fields in row["asks"]:
    body = json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "go on"}]
print(json.dumps(" ".join(m["content"] for m in messages if m["role"] == "assistant")), file=sys.stderr)
print(1.0)
"""


def played(tmp_path, *asks: dict):
    (tmp_path / "agent.py").write_text(ASKS)
    episode, engine, made = Episode({"messages": HI, "asks": asks}), Scripted(), tokenizer(NAME)
    with AgentPool(shlex.join([sys.executable, f"{tmp_path}/agent.py"]), 30.0, 1, 1000) as agents:
        play([episode], engine, agents, Chat(made, [made.eos_token_id]), LIMITS)
    return episode, engine


def test_a_stop_string_is_no_part_of_what_the_agent_sees_and_is_trained_on(tmp_path, capfd):
    """The engine answers "two" each time, and finds the stop string by itself."""
    episode, engine = played(tmp_path, {"stop": "wo"}, {}, {"stop": ["x", "o"]})
    assert [turn.how for turn in engine.asked] == [{"stop": ["wo"]}, {}, {"stop": ["x", "o"]}]
    assert '"t two tw"' in capfd.readouterr().err
    (branch,) = episode.branches  # the answer that the agent sends back is the one that it was given
    assert episode.result.answers == ["two"] * 3 and episode.result.num_constrained == 0
    assert sum(end - start for start, end in branch.holes) == len(branch.response) - 3 * len(engine.text)


@pytest.mark.parametrize("constrained", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_an_answer_by_a_schema_is_context(tmp_path, constrained):
    asks = [{"response_format": NAMED} if at in constrained else {} for at in range(3)]
    episode, engine = played(tmp_path, *asks)
    (branch,) = episode.branches
    turns, free = engine.asked, [at for at in range(3) if at not in constrained]
    starts = [len(turn.prompt) for turn in turns]
    places = {
        start + at for index in free for start in starts[index : index + 1] for at in range(len(engine.text))
    }
    everything = [*turns[2].prompt, *engine.text]
    assert everything[: len(branch.prompt) + len(branch.response)] == branch.prompt + branch.response
    first, last = min(places), max(places)
    assert len(branch.prompt) == first and len(branch.prompt) + len(branch.response) == last + 1
    holes = {first + at for start, end in branch.holes for at in range(start, end)}
    assert {*range(first, last + 1)} - holes == places
    assert len(branch.log_probs) == len(branch.versions) == len(places)
    assert (episode.reward, episode.result.num_constrained) == (1.0, len(constrained))


def test_an_episode_of_constrained_answers_alone_has_nothing_to_train_on(tmp_path):
    episode, _ = played(tmp_path, {"response_format": NAMED})
    assert (episode.reward, episode.cause, episode.branches) == (None, "malformed", [])
    assert "that can be trained on" in episode.failure and not episode.has_answers


def test_each_free_token_of_a_random_tree_is_trained_on_once():
    class Ids:
        decode = staticmethod(str)

    for seed in range(60):
        rng, session = random.Random(seed), Session(Ids())
        for number in range(rng.randint(1, 9)):
            before = rng.choice(session.answered or [None])
            prompt = (
                [0] if before is None or rng.random() < 0.2 else [*before.prompt, *before.sampled, -number]
            )
            (turn,) = session.open_ids(prompt)
            session.add([turn])
            turn.is_constrained = rng.random() < 0.4
            ids = [100 * number + at + 1 for at in range(rng.randint(1, 3))]
            session.answer(turn, ids, [float(one) for one in ids], ids)
        trained = []
        for branch in session.branches():
            holes = {at for start, end in branch.holes for at in range(start, end)}
            own = [token for at, token in enumerate(branch.response) if at not in holes]
            assert own == branch.log_probs == branch.versions and own and branch.response[-1] == own[-1]
            assert branch.response[0] == own[0] and all(start < end for start, end in branch.holes)
            assert all(a[1] < b[0] for a, b in zip(branch.holes, branch.holes[1:], strict=False))
            trained += own
        free = [token for turn in session.turns if not turn.is_constrained for token in turn.sampled]
        assert sorted(trained) == sorted(free)

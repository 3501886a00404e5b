"""Tools at the endpoint of agents, with vLLM's parsers: what is trained on is what was sampled, whatever the
parsers and the client make of it.

pytest tests/episodes/test_tool_calls.py"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.installed import answer_parsers
from megarl.config.schema import EpisodeConfig, SamplingConfig
from megarl.data.hf_tokenizer import HFTokenizer
from megarl.episodes.agent_pool import AgentPool
from megarl.episodes.answers import UNREADABLE, Completion, ToolCall, completion_of
from megarl.episodes.chat import Chat
from megarl.episodes.environments import Usage
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.runner import Answer, play
from megarl.workers.episodes import _parser
from tests.episodes.templates import PARSERS, hugging_face, parser, tokenizer
from tests.episodes.test_proxy import HI, RETRY, Answering, ask, client_of
from tests.episodes.test_session import _split, random_text
from tests.episodes.tool_agent import TOOLS
from tests.launch import command_line

COMMAND = command_line("-S", Path(__file__).with_name("tool_agent.py"))
USAGE = Usage(num_prompt=5, num_sampled=2, is_cut=False)


def written_call(rng: random.Random, name: str) -> str:
    """Return a call as models write them: in the manner of the template, and in others."""
    tool, arguments = (
        rng.choice(["add", "find"]),
        {"a": rng.randrange(99), "b": rng.choice(["é", "日本", "x"])},
    )
    text = json.dumps(
        arguments, ensure_ascii=rng.random() < 0.5, separators=rng.choice([(", ", ": "), (",", ":")])
    )
    if name == "llama3.1":
        return f'{{"name": "{tool}", "parameters": {text}}}'
    if name == "deepseek3.1":
        return f"<｜tool▁call▁begin｜>{tool}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {text}}}\n</tool_call>'


def written(rng: random.Random, name: str) -> str:
    """Return an answer with thinking, text and calls, some of them broken."""
    calls = [written_call(rng, name) for _ in range(rng.choice([0, 1, 1, 2]))]
    text = "; ".join(calls) if name == "llama3.1" else "\n".join(calls)
    if name == "deepseek3.1" and calls:
        text = f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"
    if name != "llama3.1" or not calls:
        text = random_text(rng).replace("<tool_call>", "") + text
    if name == "qwen3":
        text = f"<think>\n{rng.choice(['let me see', 'é'])}\n</think>\n\n{text}"
    return text[: rng.randrange(len(text))] if rng.random() < 0.1 and text else text


class Writing:
    """An engine that writes random answers with calls. It splits some tokens, and cuts some answers."""

    def __init__(self, name: str) -> None:
        self.name, self.rng, self.turns = name, random.Random(name), []
        self.sampled: dict[int, list[tuple[list[int], list[int]]]] = {}

    def add(self, turns):
        self.turns += turns

    def has_unfinished(self):
        return bool(self.turns)

    def step(self):
        pass

    def take(self):
        done, made, rng = [], tokenizer(self.name), self.rng
        for turn in self.turns:
            ids = made.encode_response(written(rng, self.name))
            if rng.random() < 0.3:
                ids = [one for i in ids for one in (_split(self.name, i) if rng.random() < 0.1 else [i])]
            ids = [*ids, made.eos_token_id]
            is_cut = len(ids) > 1 and rng.random() < 0.1
            ids = ids[: rng.randrange(1, len(ids))] if is_cut else ids
            self.sampled.setdefault(turn.index, []).append((turn.prompt, ids))
            done.append(
                Answer(turn.index, ids, [-float(i) for i in ids], [3] * len(ids), is_cut, turn.number)
            )
        self.turns = []
        return done


class Watched(AgentPool):
    """Notes every request as the client sent it."""

    def __init__(self, *arguments, **how) -> None:
        super().__init__(*arguments, **how)
        self.requests: dict[int, list[list[dict]]] = {}

    def replies(self, timeout_s):
        found = super().replies(timeout_s)
        for reply in found:
            if reply.messages:
                asked = self._asked[reply.episode, reply.request.number]
                self.requests.setdefault(reply.episode, []).append(asked.messages)
        return found


@pytest.mark.parametrize(
    "count", [6, pytest.param(200, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize("name, dialect", [*((name, "") for name in PARSERS), ("qwen3", " anthropic")])
def test_trained_ids_are_the_sampled_ones_where_rendering_again_would_change_them(name, dialect, count):
    made, engine = tokenizer(name), Writing(name)
    episodes = [Episode({"seed": seed}) for seed in range(count)]
    limits = Limits(max_turns=10, max_response_length=4000, max_context_length=100_000)
    with Watched(COMMAND + dialect, 60.0, 8, 1000, parser=parser(name)) as agents:
        play(episodes, engine, agents, Chat(made, [made.eos_token_id]), limits)
    num_turns, num_broken = 0, 0
    for index, episode in enumerate(episodes):
        assert episode.failure is None, episode.failure
        (branch,), sampled = episode.branches, engine.sampled[index]
        first = hugging_face(name).apply_chat_template(
            branch.messages[:1], tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        assert branch.prompt == made.encode_response(first)
        holes = {at for start, end in branch.holes for at in range(start, end)}
        trained = [token for at, token in enumerate(branch.response) if at not in holes]
        assert trained == [token for _, ids in sampled for token in ids]
        assert branch.log_probs == [-float(token) for token in trained]
        for (prompt, ids), (later, _), messages in zip(
            sampled[:-1], sampled[1:], agents.requests[index][1:], strict=True
        ):
            assert later[: len(prompt) + len(ids)] == [*prompt, *ids] and len(later) > len(prompt) + len(ids)
            again = made.encode_prompts([messages], TOOLS)[0]
            num_turns, num_broken = (
                num_turns + 1,
                num_broken + (again[: len(prompt) + len(ids)] != [*prompt, *ids]),
            )
    assert sum(episode.reward for episode in episodes) > count / 2  # the agents' number of calls
    print(f"{name}: {num_turns} turns, rendering again would change {num_broken / num_turns:.0%}")
    assert num_broken / num_turns > 0.2


def parse(name: str, text: str, tools=TOOLS, wants_calls: bool = True):
    made = tokenizer(name)
    return parser(name).parse([1], [*made.encode_response(text), made.eos_token_id], tools, wants_calls)


def test_the_parsers_find_what_the_model_wrote():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    content, reasoning, calls = parse("qwen3", f"<think>\nso\n</think>\n\nwait{call}{call}")
    assert (content.strip(), reasoning.strip()) == ("wait", "so")
    assert [(index, name, json.loads(text)) for index, name, text in calls] == [(None, "add", {"a": 1})] * 2
    assert parse("qwen2.5", call, wants_calls=False) == (call, None, [])
    assert parse("qwen2.5", "two", tools=[]) == ("two", None, [])
    broken = '<tool_call>{"name": "add", "arguments": {'
    assert parse("qwen2.5", broken)[2] == UNREADABLE
    text = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    assert [call[1:] for call in parse("deepseek3.1", text)[2]] == [("add", '{"a": 1}')]
    tagged = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'  # a special token
    assert [call[1:] for call in parse("llama3.1", tagged)[2]] == [("add", '{"a": 1}')]


def test_a_stop_token_of_the_job_is_text_unless_it_is_special():
    from megarl.rollout.answer_parser import VllmAnswerParser

    def parse_with(name: str, text: str, eos: str, stop: str):
        made = tokenizer(name)
        ends = ([made.encode_response(token)[0]] for token in (eos, stop))
        one = VllmAnswerParser(*PARSERS[name], hugging_face(name), *ends)
        return one.parse([1], made.encode_response(text), TOOLS, True)

    end = "<｜tool▁call▁end｜>"  # without it the parser finds no call
    text = f'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{{"a": 1}}{end}'
    assert parse_with("deepseek3.1", text, "<|end_of_sentence|>", end)[2] == [(None, "add", '{"a": 1}')]
    for eos, stop in (
        ("<|endoftext|>", "<|im_end|>"),
        ("<|im_end|>", "<|endoftext|>"),
    ):  # a base model's, a chat model's
        assert parse_with("qwen2.5", "two<|im_end|>", eos, stop) == ("two", None, [])


def test_calls_whose_arguments_are_no_object_are_text():
    parsed = ("said", None, [(None, "add", "{}"), (None, "add", "[1")])
    assert completion_of(parsed, "whole", USAGE, 0) == Completion("whole", USAGE)
    found = completion_of(("said", "why", [(None, "add", "{}"), ("functions.x:0", "x", "{}")]), "", USAGE, 7)
    assert [call.id for call in found.tool_calls] == ["call00007", "functions.x:0"]
    assert (found.text, found.reasoning) == ("said", "why")


class Echoing(Answering):
    """Answers every other request with a call whose arguments are the last message, and the rest with text."""

    takes_tools = True

    def _on_request(self, episode, messages, asked, request):
        self.requests.append(messages)
        parsed = ("", None, [(None, "add", messages[-1]["content"])])
        completion = completion_of(parsed, "text", USAGE, 0)
        if len(self.requests) % 2 == 0:
            completion = Completion("done", USAGE)
        self.proxy.answer(episode, request.number, [(request.number, completion)])


def nested(depth: int) -> str:
    """Return an object in which so many objects are nested."""
    return '{"a":' * depth + "1" + "}" * depth


ARGUMENTS = {
    "plain": ('{"a": 1}', True),
    "a large integer": (f'{{"a": {2**70}}}', True),
    "half a character": (r'{"a": "\ud83d"}', False),
    "a key with half a character": (r'{"\ude00": 1}', False),
    "a whole character": (r'{"a": "\ud83d\ude00"}', True),
    "depth": (nested(65), False),
    "more depth": (nested(5000), False),
    "no number": ('{"a": NaN}', False),
    "infinity": ('{"a": 1e999}', False),
    **{f"depth {depth}": (nested(depth), None) for depth in range(60, 65)},  # wherever the limit is
}


@pytest.mark.parametrize("arguments, is_call", ARGUMENTS.values(), ids=[*ARGUMENTS])
def test_every_call_that_is_given_out_may_be_sent_back(arguments, is_call):
    server = Echoing()
    try:
        first = [{"role": "user", "content": arguments}]
        status, reply = server.post(ask(first, tools=TOOLS))
        message = reply["choices"][0]["message"]
        assert status == 200 and is_call in (None, "tool_calls" in message)
        assert "tool_calls" in message or message["content"] == "text"
        more = {"role": "tool", "tool_call_id": "c", "content": "3"}
        status, reply = server.post(ask([*first, message, more], tools=TOOLS))
        assert (status, server.requests[1:]) == (200, [[more]]), reply
    finally:
        server.proxy.stop()


def test_a_name_with_half_a_character_is_text():
    parsed = ("said", None, [(None, "\ud83d", "{}")])
    assert completion_of(parsed, "whole", USAGE, 0) == Completion("whole", USAGE)


def test_a_tokenizer_without_the_parsers_tokens_is_refused():
    from megarl.rollout.answer_parser import VllmAnswerParser

    with pytest.raises(ValueError, match="--reasoning-parser mistral cannot be used with the tokenizer"):
        VllmAnswerParser(None, "mistral", hugging_face("qwen2.5"), [0])


def test_a_worker_makes_the_parser_that_the_flags_name(tmp_path):
    hugging_face("qwen2.5").save_pretrained(tmp_path)
    loaded = HFTokenizer(str(tmp_path))
    sampling = SamplingConfig(stop_token_ids=(loaded.encode_response("</tool_call>")[0],))
    job = SimpleNamespace(episodes=EpisodeConfig(tool_call_parser="hermes"), sampling=sampling)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = [*loaded.encode_response(call), loaded.eos_token_id]
    made = _parser(job, loaded, [loaded.eos_token_id])
    assert made.takes_tools and made.parse([1], ids, TOOLS, True)[2] == [(None, "add", '{"a": 1}')]
    assert made.parse([1], ids[:-1], TOOLS, False)[0] == call  # its last token is one of --stop-token-ids
    job = SimpleNamespace(episodes=EpisodeConfig(reasoning_parser="qwen3"), sampling=sampling)
    assert not _parser(job, loaded, [loaded.eos_token_id]).takes_tools
    assert _parser(SimpleNamespace(episodes=EpisodeConfig()), loaded, []) is None
    with pytest.raises(ValueError, match="need a Hugging Face tokenizer"):
        _parser(job, tokenizer("qwen2.5"), [0])


def test_the_names_that_are_checked_are_those_of_the_installed_vllm():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert answer_parsers("tool_parsers") == tuple(sorted(ToolParserManager.lazy_parsers))
    assert answer_parsers("reasoning") == tuple(sorted(ReasoningParserManager.lazy_parsers))


class Calling(Answering):
    """Answers the first request with two calls and reasoning, and later ones with text."""

    takes_tools = True

    def _on_request(self, episode, messages, asked, request):
        self.requests.append((episode, messages, asked))
        calls = (ToolCall("call00000", "add", '{"a": 1}'), ToolCall("call00001", "find", '{"b": "é"}'))
        first = Completion("", USAGE, "I think", calls)
        completion = first if len(self.requests) % 2 else Completion("done", USAGE)
        self.proxy.answer(episode, request.number, [(request.number, completion)])


@pytest.fixture
def server():
    made = Calling()
    yield made
    made.proxy.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_sdk_calls_tools(server, monkeypatch, stream):
    client = client_of(server, monkeypatch)
    how = {"model": "m", "tools": TOOLS, "tool_choice": "auto"}
    if stream:
        with client.chat.completions.stream(messages=HI, **how) as events:
            for _ in events:
                pass
        choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(messages=HI, **how).choices[0]
    message = choice.message
    assert choice.finish_reason == "tool_calls" and not message.content
    assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"] == "I think"
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("call00000", "add", '{"a": 1}'),
        ("call00001", "find", '{"b": "é"}'),
    ]
    echoed = message.to_dict()
    echoed["tool_calls"][0]["function"]["arguments"] = '{\n"a":1}'  # a client may write them anew
    results = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
    last = client.chat.completions.create(messages=[*HI, echoed, *results], **{**how, "tool_choice": "none"})
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("done", "stop")
    (_, first, asked), (_, second, later) = server.requests
    assert (first, second, asked.tools) == (HI, results, TOOLS)
    assert (asked.wants_calls, later.wants_calls) == (True, False)


def edited(**function) -> list[dict]:
    return [{"type": "function", "function": {**TOOLS[0]["function"], **function}}]


DEEP = json.loads('{"a":' * 100 + "1" + "}" * 100)
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def spoken(**call) -> list[dict]:
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [{**CALL, **call}]}, *HI]


REFUSED = {
    "another type": (ask(HI, tools=[{"type": "custom"}]), "tools[0].type must be function"),
    "no function": (ask(HI, tools=[{"type": "function"}]), "tools[0] is not a tool"),
    "no name": (ask(HI, tools=edited(name="")), "tools[0] must have a name"),
    "a name twice": (ask(HI, tools=[*TOOLS, *TOOLS]), "tools[2] must have a name that no other"),
    "a depth": (ask(HI, tools=edited(parameters=DEEP)), "tools[0] is nested deeper than 64"),
    "no object": (
        ask(spoken(function={"name": "x", "arguments": "[]"}), tools=TOOLS),
        "must be a JSON object",
    ),
    "deep arguments": (
        ask(spoken(function={"name": "x", "arguments": json.dumps(DEEP)}), tools=TOOLS),
        "nested deeper than 64",
    ),
    "half a character": (
        ask(spoken(function={"name": "x", "arguments": r'{"a": "\ud800"}'}), tools=TOOLS),
        "function.arguments.a has half of a surrogate pair",
    ),
    "a large number": (ask(HI, tools=edited(parameters={"max": 2**70})), "tools[0].function.parameters.max"),
    "a large argument": (
        ask(spoken(function={"name": "x", "arguments": f'{{"a": {2**70}}}'}), tools=TOOLS),
        "function.arguments.a is an integer of 71 bits; -2^63 to 2^64 - 1 can be stored",
    ),
    "no number": (
        ask(spoken(function={"name": "x", "arguments": '{"a": NaN}'}), tools=TOOLS),
        "function.arguments.a is nan, which JSON cannot hold",
    ),
    "a user's call": (ask([{**HI[0], "tool_calls": [CALL]}], tools=TOOLS), "of the assistant only"),
}


def test_tools_are_refused_by_name(server):
    assert server.post(ask(HI, tools=TOOLS))[0] == 200
    for name, (body, wanted) in REFUSED.items():
        status, reply = server.post(body)
        assert status == 400 and wanted in reply["error"]["message"], (name, reply)
    status, reply = server.post(ask(HI, tools=TOOLS), **RETRY)
    assert status == 200 and reply["choices"][0]["message"]["tool_calls"] and len(server.requests) == 1

"""--train-turns all: which ids of a conversation are trained on, and that a job trains on just these.

pytest tests/workers/test_sft_turns.py"""

from __future__ import annotations

import json
import random

import pytest

from megarl.data.columns import Prompt
from megarl.workers.sft import RowSample, encode_turns
from tests.e2e.jobs import train
from tests.episodes.templates import TEMPLATES, tokenizer
from tests.episodes.test_session import chat_of, random_text


def conversation(rng: random.Random, num_turns: int) -> list[dict[str, str]]:
    messages = []
    for _ in range(num_turns):
        messages += [
            {"role": "user", "content": random_text(rng) + "q"},
            {"role": "assistant", "content": random_text(rng) + "a"},
        ]
    return messages


def row_of(messages: list[dict[str, str]]) -> Prompt:
    return Prompt(messages=tuple(messages[:-1]), response=messages[-1]["content"])


def trained(row: RowSample) -> list[list[int]]:
    """The runs of ids that are trained on."""
    runs, end = [], 0
    for hole in [*row.holes, (len(row.response), None)]:
        runs.append(row.response[end : hole[0]])
        end = hole[1]
    return runs


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_turn_is_trained_on_and_its_context_is_that_of_the_conversation(name):
    made, chat, rng = tokenizer(name), chat_of(name), random.Random(name)
    for _ in range(10):
        messages = conversation(rng, rng.randint(1, 4))
        row = encode_turns(chat, made, row_of(messages))
        answers = [one["content"] for one in messages if one["role"] == "assistant"]
        wanted = [[*made.encode_response(text), made.eos_token_id] for text in answers]
        assert trained(row) == wanted and row.num_trained == sum(map(len, wanted))
        assert row.prompt == made.encode_prompt(messages[:1])
        for index, hole in enumerate(row.holes, 1):  # the question is in the context
            question = made.decode(made.encode_response(messages[2 * index]["content"]))
            assert question.strip() in made.decode(row.response[slice(*hole)])  # some templates strip


def test_a_turn_with_tool_calls_is_refused():
    """Only its text would be trained on, which then ends where the call should be."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "1"}]
    with pytest.raises(ValueError, match="message 1 has tool_calls .*, wanted the calls in `content`"):
        encode_turns(chat_of("qwen2.5"), tokenizer("qwen2.5"), Prompt(messages=tuple(messages), response="1"))


def test_one_turn_is_what_it_was():
    made, chat = tokenizer("qwen2.5"), chat_of("qwen2.5")
    ids = [*made.encode_response("two"), made.eos_token_id]
    messages = [{"role": "user", "content": "1+1"}]
    one = encode_turns(chat, made, Prompt(messages=tuple(messages), response="two"))
    assert one == RowSample(made.encode_prompt(messages), ids)
    text = encode_turns(chat, made, Prompt(messages="1+1", response="two"))
    assert text == RowSample(made.encode_prompt("1+1"), ids)
    opened = [{"role": "assistant", "content": "hello"}, *messages]
    assert encode_turns(chat, made, Prompt(messages=tuple(opened), response="two")).response == ids


@pytest.mark.nightly
def test_the_loss_of_a_conversation_is_that_of_its_turns_in_rows_of_their_own(sums_data, tmp_path):
    conversations = [
        [
            {"role": "user", "content": f"{a}+1 ?"},
            {"role": "assistant", "content": f"{a}+1"},
            {"role": "tool", "content": str(a + 1)},
            {"role": "assistant", "content": f"#### {a + 1}"},
        ]
        for a in (101, 202)
    ]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    whole.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    parts.write_text(
        "".join(json.dumps({"messages": one[:end]}) + "\n" for one in conversations for end in (2, 4))
    )

    def loss(rows, number: int, *flags: str) -> dict[str, float]:
        arguments = ("--algorithm", "sft", "--train-iters", "1", "--nproc-per-node", "1")
        batch = ("--train-data", str(rows), "--global-batch-size", str(number))
        job = train(sums_data, tmp_path / f"run{number}", *arguments, *batch, *flags)
        assert job.returncode == 0, job.output
        return job.metrics[0]

    all_turns, one_turn = loss(whole, 2, "--train-turns", "all"), loss(parts, 4)
    for name in ("policy/loss", "policy/grad_norm"):
        assert all_turns[name] == pytest.approx(one_turn[name], rel=1e-5)

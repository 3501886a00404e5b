"""--train-turns all: which ids of a conversation are trained on, and that a job trains on just these.

pytest tests/workers/test_sft_turns.py"""

from __future__ import annotations

import json
import random

import pytest

from megarl.data.columns import Prompt
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.rendering import RowSample
from megarl.episodes.session import Session
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


def trained(row: RowSample) -> list[list[int]]:
    """The runs of ids that are trained on."""
    runs, end = [], 0
    for hole in [*row.holes, (len(row.response), None)]:
        runs.append(row.response[end : hole[0]])
        end = hole[1]
    return runs


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_row_is_the_episode_in_which_the_model_says_the_same(name):
    """The context of every turn is what a rollout would put there, after the same answers."""
    made, rng = tokenizer(name), random.Random(name)
    for _ in range(10):
        messages = conversation(rng, rng.randint(1, 4))
        row = Prompt(messages=tuple(messages[:-1]), response=messages[-1])
        (sample,) = PromptEncoder(made, PromptDataset([row])).answers([0], turns="all")
        session, parent = Session(chat_of(name)), None
        for question, ids in zip(messages[::2], trained(sample), strict=True):
            (turn,) = session.open([question], parent)
            session.add([turn])
            session.answer(turn, ids, [0.0] * len(ids), [0] * len(ids))
            parent = turn
        (branch,) = session.branches()
        assert (sample.prompt, sample.response) == (branch.prompt, branch.response)
        assert [*sample.holes] == branch.holes and sample.num_trained == len(branch.log_probs)


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

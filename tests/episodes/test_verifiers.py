"""Rollouts of the real package verifiers, with both of its clients, against a scripted engine.

    MEGARL_TEST_VERIFIERS_PYTHON=path/to/venv/bin/python pytest tests/episodes/test_verifiers.py -m nightly

The venv needs `pip install verifiers==0.4.0 renderers==0.1.12`, and nothing of megarl."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megarl.episodes import verifiers_env
from megarl.episodes.chat import Chat
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.runner import play
from megarl.episodes.verifiers_pool import Verifiers, VerifiersPool
from tests.episodes.templates import hugging_face, tokenizer
from tests.episodes.test_runner import NAME, Scripted

PYTHON = os.environ.get("MEGARL_TEST_VERIFIERS_PYTHON")
TASKS = Path(__file__).with_name("verifiers_tasks")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PYTHON is None, reason="MEGARL_TEST_VERIFIERS_PYTHON names no Python with verifiers"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    path = tmp_path_factory.mktemp("verifiers") / "rows.jsonl"
    command = [PYTHON, verifiers_env.__file__, "megarl_counting", path]
    environment = {**os.environ, "PYTHONPATH": str(TASKS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["prompt"] for row in found] == [
        [{"role": "user", "content": f"start {bonus}"}] for bonus in (0.25, 0.5, -1.0)
    ]
    return found


def run(rows, monkeypatch, client: str, folder: str = "", limits=Limits(10, 8, 1000)):
    monkeypatch.setenv("PYTHONPATH", str(TASKS))
    made, engine = tokenizer(NAME), Scripted()
    episodes = [Episode(row) for row in rows]
    verifiers = Verifiers("megarl_counting", PYTHON, client, folder)
    how = {"timeout_s": 300.0, "num_per_process": 16, "max_length": 1000}
    with VerifiersPool(verifiers, **how, vocab_size=len(hugging_face(NAME))) as rollouts:
        play(episodes, engine, rollouts, Chat(made, [made.eos_token_id]), limits)
        assert not rollouts._episode_of and not rollouts.proxy._conversations
    return episodes, engine


@pytest.mark.parametrize("client", ["eval", "train"])
def test_both_clients_play_rollouts_and_score_them(rows, monkeypatch, tmp_path, client):
    """A rollout has the reward that verifiers gives it, and one sample with both answers. One that verifiers
    cannot score has failed, and no other."""
    hugging_face(NAME).save_pretrained(tmp_path)
    episodes, engine = run([*rows, rows[0]], monkeypatch, client, str(tmp_path))
    assert [episode.reward for episode in episodes] == [2.25, 2.5, None, 2.25], [
        episode.failure for episode in episodes
    ]
    assert episodes[2].cause == "raised" and "a bonus below 0" in episodes[2].failure
    made = tokenizer(NAME)
    for index, (row, episode) in enumerate(zip([*rows, rows[0]], episodes, strict=True)):
        (branch,) = episode.branches
        assert episode.result.num_turns == 2 and len(branch.holes) == 1
        first = made.encode_prompts([row["prompt"]])[0]
        assert branch.prompt == first
        second = [turn.prompt for turn in engine.asked if turn.index == index][1]
        assert second[: len(first) + len(engine.text)] == [*first, *engine.text]
        assert branch.prompt + branch.response == [*second, *engine.text]
        text = made._tokenizer.decode(second, skip_special_tokens=False)
        assert text.endswith("more 0<|im_end|>\n<|im_start|>assistant\n")


def test_a_row_without_a_task_and_a_limit(rows, monkeypatch):
    (bad, good), _ = run([{"prompt": []}, rows[0]], monkeypatch, "eval", limits=Limits(1, 8, 1000))
    assert bad.cause == "raised" and "has no task of verifiers in extra_info.task" in bad.failure
    assert good.result.num_turns == 1 and good.finish in ("turns", "env")

"""Whole jobs with the chat templates of several model families: the log-prob gate compares every sampled token of
every turn, and the trained ids are the sampled ones.

pytest tests/e2e/test_templates_job.py -m nightly"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from megarl.config.hf_config import ModelShape
from megarl.data.quick_tokenizer import load_quickly
from megarl.new.tiny_config import TinySizes, hf_config
from megarl.new.tiny_model import initial_weights
from tests.e2e.jobs import train
from tests.episodes.templates import TEMPLATES, tokenizer

ENV = f"{Path(__file__).with_name('envs.py')}:Talking"


def write_model(folder: Path, name: str) -> list[int]:
    """Write a model with random weights and a family's template. Returns ids that end its answers: with the token
    that ends a turn alone, which is one of 430, hardly any answer of this model would end."""
    folder.mkdir()
    made, (template, end) = tokenizer(name), TEMPLATES[name]
    made._tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": end, "pad_token": "<|endoftext|>", "chat_template": template}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab_size = made._tokenizer.get_vocab_size()
    config = hf_config(TinySizes(), vocab_size, made.eos_token_id, 0)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(initial_weights(ModelShape.load(folder), seed=0))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return [made.eos_token_id, *range(100, 130)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_gate_holds_on_every_sampled_token_of_every_turn(name, sums_data, tmp_path):
    """Random answers, most of which are no text that the tokenizer would make; replies of tools with unicode; answers
    and episodes that are cut."""
    ends = write_model(tmp_path / "model", name)
    flags = (
        *("--model", str(tmp_path / "model"), "--env", ENV, "--stop-token-ids", *map(str, ends)),
        *("--max-turns", "4", "--max-prompt-length", "200", "--max-context-length", "320"),
        *("--max-response-length", "12", "--num-rollouts-to-log", "-1", "--train-iters", "2", "--lr", "1e-2"),
    )
    job = train(sums_data, tmp_path / "run", *flags)
    assert job.returncode == 0, job.output
    made = load_quickly(tmp_path / "model")
    for number, step in enumerate(job.steps, 1):
        lines = (job.folder / "rollouts" / f"step_{number:06d}.jsonl").read_text().splitlines()
        rows, sampled, num_changed = [json.loads(line) for line in lines], 0, 0
        for row in rows:
            runs, end = [], 0
            for hole in [*row["holes"], [len(row["response_ids"])] * 2]:
                runs.append(row["response_ids"][end : hole[0]])
                end = hole[1]
            sampled += sum(map(len, runs))
            answers = [one["content"] for one in row["turns"] if one["role"] == "assistant"]
            assert [made.decode(ids) for ids in runs] == answers
            num_changed += sum(
                made.encode_response(text) != ids for text, ids in zip(answers, runs, strict=True)
            )
        assert num_changed > len(rows)  # what encoding the texts again would lose
        assert step["mismatch/tokens"] == sampled and step["mismatch/max_abs"] < 5e-5
        assert 0 < step["response/truncated"] and step["turns/max"] >= 3 and step["policy/grad_norm"] > 0
        assert step["reward/failed"] == 0 and any("日本" in str(row["turns"]) for row in rows)

"""What `megarl eval` prints, made of samples whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.evaluation.arguments import DEFAULTS, Options
from megarl.evaluation.job import _report
from megarl.evaluation.report import as_json, sample_lines, table
from megarl.files.writing import WriteError
from megarl.trainer.eval_scores import EvalSample
from megarl.trainer.evaluation import HeldOut, metrics_of


def held_out(rewards: list[list[float | None]], answers: bool = True, sources: str = "aab") -> HeldOut:
    samples, records = [], []
    for row, of_row in enumerate(rewards):
        for index, reward in enumerate(of_row):
            answer = ("17" if reward else "18") if answers else None
            failure = "boom" if reward is None else None
            samples.append(EvalSample(row, index, f"set/{sources[row]}", reward, answer, 4, False, failure))
            records.append({"sample_id": row * len(of_row) + index, "row": row, "reward": reward})
    return HeldOut(samples, records)


@pytest.fixture
def config():
    def make(*flags: str):
        return load_config(["--model", "m", "--eval-data", "d.jsonl", *flags], REGISTRY, defaults=DEFAULTS)

    return make


RIGHT = held_out([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
GREEDY = held_out([[1.0], [0.0], [0.0]])


def test_right_and_wrong_rewards_have_an_accuracy_and_pass_at_k(config) -> None:
    result = as_json(config("--eval-num-samples", "2"), "m", RIGHT, GREEDY)
    scores = result["all"]
    assert result["rewards_are_right_or_wrong"] and scores["reward"]["value"] == 0.5
    assert (scores["pass_at_1"]["value"], scores["pass_at_2"]["value"]) == (0.5, pytest.approx(2 / 3))
    assert scores["maj_at_2"]["value"] == pytest.approx(2 / 3) and "best_at_2" not in scores
    assert scores["reward_greedy"]["value"] == pytest.approx(1 / 3) and scores["failed"] == 0
    sources = result["sources"]
    assert {name: found["reward"]["value"] for name, found in sources.items()} == {
        "set/a": 0.75,
        "set/b": 0.0,
    }
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    text = table(result)
    assert "accuracy (mean@2)" in text and "pass@2" in text and "maj@2" in text and "set/b" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_shaped_reward_has_neither(config) -> None:
    result = as_json(config("--eval-num-samples", "2"), "m", held_out([[0.5, 0.25]], answers=False), GREEDY)
    scores = result["all"]
    assert scores["best_at_2"]["value"] == 0.5 and scores["reward"]["value"] == 0.375
    assert "pass_at_1" not in scores and scores["maj_at_2"] is None and scores["reward"]["low"] is None
    text = table(result)
    assert "accuracy (" not in text and "accuracy, greedy" not in text and "maj@2 " not in text
    assert "mean reward (mean@2)" in text and "No maj@2: the reward function names no answers" in text


def test_failures_are_named(config) -> None:
    result = as_json(config(), "m", held_out([[None], [1.0]]), held_out([[1.0], [1.0]]))
    assert result["all"]["failed"] == 1 and result["all"]["reward"]["value"] == 1.0
    assert "1 sampled responses have no reward" in table(result) and "boom" in table(result)


def test_temperature_0_has_the_greedy_answer_alone(config) -> None:
    result = as_json(config("--temperature", "0"), "m", None, GREEDY)
    assert "reward" not in result["all"] and "accuracy, greedy" in table(result)


def test_samples_are_lines_that_show_reads(tmp_path, capsys) -> None:
    from megarl import cli

    file = tmp_path / "samples.jsonl"
    for one in (RIGHT, GREEDY):
        for record in one.records:
            record |= {"prompt": "1+1 ?", "response": f"row {record['row']}", "answer": "17"}
    file.write_text("".join(f"{line}\n" for line in sample_lines(RIGHT, GREEDY)))
    assert cli.main(["show", str(file), "--best", "1", "--worst", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "9 samples, of 3 prompts, reward 0.4444 (0 to 1)" in out
        and "eval/reward" in out
        and "step" not in out
    )
    assert "answer that was found in it 17" in out


def test_a_job_s_metrics_have_names_that_are_always_true() -> None:
    metrics = metrics_of(RIGHT, GREEDY, 2)
    assert metrics == {
        "eval/reward": 0.5,
        "eval/reward_greedy": pytest.approx(1 / 3),
        "eval/best_at_2": pytest.approx(2 / 3),
        "eval/maj_at_2": pytest.approx(2 / 3),
        "eval/reward/set/a": 0.75,
        "eval/reward/set/b": 0.0,
        "eval/reward_greedy/set/a": 0.5,
        "eval/reward_greedy/set/b": 0.0,
    }
    one = metrics_of(held_out([[None], [1.0]]), GREEDY, 1)
    assert one == {"eval/reward": 1.0, "eval/reward_greedy": pytest.approx(1 / 3), "eval/failed": 1.0} | {
        name: value for name, value in one.items() if name.count("/") > 1
    }


@pytest.mark.parametrize("as_json_too", [False, True], ids=["table", "json"])
def test_scores_are_told_before_the_samples_are_written(config, tmp_path, capsys, as_json_too) -> None:
    """/dev/full is a disk without room: the scores of the evaluation must outlive it."""
    held = {"": {False: RIGHT, True: GREEDY}}
    result = as_json(config(), "m", RIGHT, GREEDY)
    expected = json.dumps(result) + "\n" if as_json_too else table(result)
    with pytest.raises(WriteError, match="/dev/full cannot be written: No space left on device"):
        _report(config(), {"": "m"}, held, Options(Path("/dev/full"), as_json_too))
    assert capsys.readouterr().out == expected
    out = tmp_path / "samples.jsonl"
    _report(config(), {"": "m"}, held, Options(out, as_json_too))
    told = f"samples: {out}; look at them with `megarl show {out}`\n"
    assert capsys.readouterr().out == expected + ("" if as_json_too else told)
    assert out.read_text().splitlines() == [*sample_lines(RIGHT, GREEDY)]

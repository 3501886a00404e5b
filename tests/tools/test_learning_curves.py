"""tools/benchmarks/learning_curves.py goes on where it was stopped, and its table says what was not run;
permuted_reward.py permutes the rewards of a group."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "tools" / "benchmarks"


@pytest.fixture
def tool(monkeypatch):
    for folder in (BENCHMARKS, BENCHMARKS.parents[1] / "examples"):
        monkeypatch.syspath_prepend(str(folder))
    import learning_curves

    return learning_curves


@pytest.fixture
def jobs(tool, tmp_path, monkeypatch):
    """The jobs that were started, each of which ends at once; those named in `broken` fail."""
    started: list[str] = []
    broken: set[str] = set()

    def job(command, *words, seconds):
        save = Path(words[words.index("--save") + 1])
        started.append(save.name)
        if save.name in broken:
            raise subprocess.TimeoutExpired("megarl train", seconds)
        save.mkdir(parents=True)
        after = 0.125 if "--reward-function" in words else 0.75 if save.name.endswith("_0") else 0.5
        sampled = 0.3 if "--reward-function" in words else after
        points = ((0, 0.25, 0.125), (30, sampled, after))
        rows = [{"step": s, "eval/reward": v, "eval/reward_greedy": g} for s, v, g in points]
        (save / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    model = tmp_path / "sft_mixed" / "hf"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    monkeypatch.setattr(tool, "megarl", job)
    monkeypatch.setattr(tool, "plot", lambda *_: None)
    return started, broken


def start(tool, folder, *flags):
    return tool.main(["--quickstart", str(folder), "--out", str(folder / "out"), *flags])


def row_of(folder, name):
    lines = (folder / "out" / "table.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.split("|")[3:-1]]


def test_an_interrupted_table_goes_on(tool, jobs, tmp_path):
    started, broken = jobs
    broken |= {"grpo_1", "grpo_control_1"}
    assert start(tool, tmp_path, "--only", "grpo") == 1
    assert started == ["grpo_0", "grpo_control_0", "grpo_1", "grpo_control_1"]
    half = "(1 of 2 seeds)"
    assert row_of(tmp_path, "GRPO") == [
        *("0.125, 0.750", "not run"),
        *(f"+0.625 {half}", f"+0.000 {half}", f"+0.050 {half}"),
    ]
    assert row_of(tmp_path, "GSPO") == ["not run"] * 5
    (tmp_path / "out" / "cells" / "grpo_1.new").write_text('{"rows": [')  # a kill while it was written
    started.clear()
    broken.clear()
    assert start(tool, tmp_path, "--only", "grpo") == 0
    assert started == ["grpo_1", "grpo_control_1"]
    assert row_of(tmp_path, "GRPO") == ["0.125, 0.750", "0.125, 0.500", "+0.500", "+0.000", "+0.050"]


def test_a_control_is_blind_to_the_answers_of_its_algorithm(tool, jobs, tmp_path, monkeypatch):
    """Permuted rewards still tell which prompts are easy, so an algorithm without groups gets those of a coin."""
    chosen, job = {}, tool.megarl

    def noted(command, *words, seconds):
        if "--reward-function" in words:
            chosen[words[words.index("--save") + 1].name] = words[words.index("--reward-function") + 1]
        job(command, *words, seconds=seconds)

    monkeypatch.setattr(tool, "megarl", noted)
    assert start(tool, tmp_path, "--only", "grpo,ppo-defaults,reinforce++-defaults", "--seeds", "0") == 0
    assert {name: one.rpartition(":")[2] for name, one in chosen.items()} == {
        "grpo_control_0": "permuted",
        "ppo-defaults_control_0": "coin",
        "reinforce++-defaults_control_0": "coin",
    }


def test_methods_are_those_that_sample_with_distinct_names(tool, tmp_path, capsys):
    keys = [method.key for method in tool.methods()]
    assert len(set(keys)) == len(keys) and {"grpo", "ppo-defaults", "reinforce++-with-baseline"} <= {*keys}
    assert not {"cdpo", "dpo-defaults", "sft-defaults", "ipo-as-trl", "kto-defaults"} & {*keys}
    losses = " ".join(method.flags for method in tool.methods()).split()
    assert set(tool.TRANSFORMS) - {"ppo"} <= {*losses}
    with pytest.raises(SystemExit):
        start(tool, tmp_path, "--only", "grpo,dpo")
    assert "--only (dpo): must be of grpo," in capsys.readouterr().err


def test_the_picture_has_each_method_that_ran(tool, tmp_path):
    rows = [{"step": 0, "eval/reward_greedy": 0.1}, {"step": 5, "eval/reward_greedy": 0.4}]
    tool.plot(tool.methods(), [0], {"gspo_0": rows, "gspo_control_0": rows}, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert "GSPO" in text and "control, seed 0" in text and "GMPO" not in text


def test_rewards_are_permuted_within_their_group(tool, tmp_path, monkeypatch):
    from permuted_reward import permuted

    monkeypatch.setenv("MEGARL_PERMUTED", str(tmp_path))
    answers = ["#### 5"] * 3 + [f"#### {n}" for n in range(10, 15)]
    kept = []
    with ThreadPoolExecutor(8) as threads:
        for index in range(12):
            extra = {"split": "train", "index": index}
            calls = [threads.submit(permuted, "megarl/sums", text, "5", extra) for text in answers]
            rewards = [call.result(timeout=20) for call in calls]
            assert sorted(rewards) == [0.0] * 5 + [1.0] * 3
            kept.append(sum(rewards[:3]))
    assert sum(kept) < 30, "right answers keep their rewards"
    assert permuted("megarl/sums", "#### 5", "5", {"split": "test", "index": 0}) == 1.0
    assert "learning_curves" in sys.modules


def test_a_coin_knows_nothing_but_held_out_answers(tool):
    from permuted_reward import coin

    row = {"data_source": "megarl/sums", "ground_truth": "17"}
    training = [coin(solution_str="#### 17", extra_info={"split": "train"}, **row) for _ in range(4000)]
    # a quarter of 4000, with a standard deviation of 27: five of them
    assert {*training} == {0.0, 1.0} and abs(sum(training) - 1000) < 137
    held_out = {"split": "test"}
    assert coin(solution_str="#### 17", extra_info=held_out, **row) == 1.0
    assert coin(solution_str="#### 16", extra_info=held_out, **row) == 0.0

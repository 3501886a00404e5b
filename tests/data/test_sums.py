"""The quickstart's task: problems, answers, held-out split, files, tokenizer and model, each against an
independent reckoning."""

import filecmp
import hashlib
import itertools
import json
import math
import os
import random
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from megarl.data.columns import text_of
from megarl.data.prompts import PromptDataset
from megarl.rewards.base import RewardSample, judge
from megarl.rewards.routing import auto_reward
from tests.launch import run, succeed
from sums.files import NUM_MIXED_ROWS, NUM_PAIRS, NUM_TRAIN_ROWS, NUM_WORKED_ROWS, make_sums
from sums.problems import is_test, snap_answer, sums, worked_answer

FILES = ("train.jsonl", "test.jsonl", "test.parquet", "sft_worked.jsonl", "sft_mixed.jsonl")
FILES += ("pairs.jsonl", "pairs_test.jsonl")
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)


def read_rows(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check_worked(question, answer, truth):
    """Follows the written steps: each starts where the last ended, is right, and together they are the
    question."""
    *steps, last = answer.split("\n")
    parsed = [re.fullmatch(r"(\d+)([+-]\d+)=(\d+)", step).groups() for step in steps]
    assert parsed[0][0] + "".join(op for _, op, _ in parsed) + " ?" == question
    assert all(int(value) + int(op) == int(result) for value, op, result in parsed)
    assert all(before[2] == after[0] for before, after in itertools.pairwise(parsed))
    assert last == f"#### {parsed[-1][2]}" and parsed[-1][2] == truth


@pytest.mark.parametrize(("lo", "hi", "kmax"), [(2, 3, 5), (1, 1, 1), (2, 4, 9), (3, 3, 45)])
@pytest.mark.parametrize("split", ["train", "test"])
def test_problems_and_worked_answers_are_right(split, lo, hi, kmax):
    rng = random.Random(0)
    for _ in range(300):
        problem = sums(rng, split, lo, hi, kmax)
        numbers = [int(n) for n in re.findall(r"[+-]?\d+", problem.question)]
        running = [sum(numbers[: i + 1]) for i in range(len(numbers))]
        assert all(10 <= value <= 99 for value in running) and lo <= len(numbers) - 1 <= hi
        assert all(1 <= abs(n) <= kmax for n in numbers[1:])
        check_worked(problem.question, worked_answer(problem), str(running[-1]))
        assert (
            int(hashlib.sha1(problem.question.removesuffix(" ?").encode()).hexdigest(), 16) % 16 == 0
        ) == (split == "test")


def test_first_test_problem_is_the_specification_s():
    # facts: the first held-out problem of the measured runs, so that our accuracies can be compared with
    # theirs.
    assert sums(random.Random(10_000), "test").question == "23-5-1 ?"


def test_snap_answers_are_near_and_right_one_time_in_eight():
    rng = random.Random(0)
    differences = []
    for _ in range(8000):
        problem = sums(rng, "train")
        guess = int(snap_answer(problem, rng).removeprefix("#### "))
        assert 0 <= guess <= 99
        differences.append(guess - problem.answer)
    assert set(differences) == set(range(-4, 4))
    # 1000 expected, standard deviation 30: five of them. (Clipping to 99 adds a right guess for the few
    # answers above 96: 0.5 % of rows.)
    assert abs(differences.count(0) - 1000) < 150 + 40


@pytest.mark.parametrize("arguments", [("dev",), ("train", 3, 2), ("train", 0, 2), ("train", 2, 3, 46)])
def test_impossible_parameters_are_refused(arguments):
    with pytest.raises(ValueError, match="must be train or test"):
        sums(random.Random(0), *arguments)


def test_files_hold_what_they_should(sums_paths):
    train, test = read_rows(sums_paths["train"]), read_rows(sums_paths["test"])
    worked, mixed = read_rows(sums_paths["sft_worked"]), read_rows(sums_paths["sft_mixed"])
    assert (len(train), len(test), len(worked), len(mixed)) == (
        NUM_TRAIN_ROWS,
        200,
        NUM_WORKED_ROWS,
        NUM_MIXED_ROWS,
    )
    keys = [{row["extra_info"]["key"] for row in rows} for rows in (train + worked + mixed, test)]
    assert not keys[0] & keys[1]
    assert all(map(is_test, keys[1])) and not any(map(is_test, keys[0]))
    for split, rows in (("train", train + worked + mixed), ("test", test)):
        for row in rows:
            assert (
                row["data_source"] == "megarl/sums"
                and row["ability"] == "math"
                and row["extra_info"]["split"] == split
            )
            check_worked(
                row["prompt"][0]["content"], row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
            )
    assert [row["extra_info"]["index"] for row in train] == list(range(len(train)))
    assert all(row["response"] == row["extra_info"]["answer"] for row in worked)
    share = sum(row["response"] == row["extra_info"]["answer"] for row in mixed) / len(mixed)
    assert abs(share - 0.3) < 0.045  # five standard deviations of 2560 draws
    assert all(
        re.fullmatch(r"#### \d+", row["response"])
        for row in mixed
        if row["response"] != row["extra_info"]["answer"]
    )


def test_reward_agrees_with_the_answers(sums_paths):
    mixed = PromptDataset.load(sums_paths["sft_mixed"], needs="response")
    rewards = [
        judge(auto_reward, RewardSample(p.data_source, text_of(p.response), p.ground_truth, p.extra_info))
        for p in mixed
    ]
    assert rewards == [
        float(int(text_of(p.response).rpartition("#### ")[2]) == int(p.ground_truth)) for p in mixed
    ]
    assert abs(sum(rewards) / len(rewards) - (0.3 + 0.7 / 8)) < 0.05  # five standard deviations


def test_parquet_and_jsonl_hold_the_same_rows(sums_paths):
    jsonl, parquet = (
        PromptDataset.load(sums_paths[name], needs="ground_truth") for name in ("test", "test_parquet")
    )
    assert len(jsonl) == 200 and list(jsonl) == list(parquet)


def test_same_seed_same_bytes_and_other_seed_other_rows(sums_paths, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    make_sums(again, seed=0)
    make_sums(other, seed=1)
    first = os.path.dirname(sums_paths["train"])
    names = [*FILES, *(f"model/{name}" for name in MODEL_FILES)]
    assert filecmp.cmpfiles(first, again, names, shallow=False) == (names, [], [])
    same = ["test.jsonl", "test.parquet", "pairs_test.jsonl", *(f"model/{name}" for name in MODEL_FILES[:-1])]
    assert sorted(filecmp.cmpfiles(first, other, names, shallow=False)[0]) == sorted(same)


def test_seed_out_of_range_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--seed \(-1\)"):
        make_sums(tmp_path / "never", seed=-1)
    assert not (tmp_path / "never").exists()


def test_model_loads_in_transformers_and_every_weight_is_ours(sums_paths):
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(sums_paths["model"], output_loading_info=True)
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 368_128
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.rope_parameters["rope_theta"] == 10_000.0 and not model.config.tie_word_embeddings
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    weights = load_file(f"{sums_paths['model']}/model.safetensors")
    assert set(weights) == set(model.state_dict())
    assert all(np.array_equal(weights[name], tensor.numpy()) for name, tensor in model.state_dict().items())


def test_initial_scales(sums_paths):
    for name, weight in load_file(f"{sums_paths['model']}/model.safetensors").items():
        if weight.ndim == 1:
            assert np.all(weight == 1)
            continue
        residual = 0.5 if "o_proj" in name or "down_proj" in name else 1.0  # 1/sqrt(2 * 2 layers)
        expected = (
            0.3 if "embed" in name else 0.02 if "lm_head" in name else residual / math.sqrt(weight.shape[1])
        )
        # The relative standard error of a standard deviation of n normals is 1/sqrt(2n); five of them.
        assert abs(weight.std() / expected - 1) < 5 / math.sqrt(2 * weight.size), name
        assert abs(weight.mean()) < 5 * expected / math.sqrt(weight.size), name


def test_tool_writes_the_same_files(sums_paths, tmp_path):
    tool = os.path.join(os.path.dirname(__file__), "..", "..", "tools", "make_sums.py")
    succeed(tool, "--out", tmp_path, "--seed", "0", timeout=120)
    names = [*FILES, *(f"model/{name}" for name in MODEL_FILES)]
    assert filecmp.cmpfiles(os.path.dirname(sums_paths["train"]), tmp_path, names, shallow=False) == (
        names,
        [],
        [],
    )
    refused = run(tool, "--out", tmp_path, "--seed", "-1", timeout=120)
    assert refused.returncode == 2 and "--seed (-1) must be in" in refused.stderr


def test_pairs_prefer_worked_answers_to_wrong_guesses(sums_paths):
    for name, split, count in (("pairs", "train", NUM_PAIRS), ("pairs_test", "test", 200)):
        rows = read_rows(sums_paths[name])
        assert len(rows) == count
        for row in rows:
            truth, question = row["reward_model"]["ground_truth"], row["prompt"][0]["content"]
            assert row["extra_info"]["split"] == split and is_test(row["extra_info"]["key"]) == (
                split == "test"
            )
            check_worked(question, row["chosen"], truth)
            guess = re.fullmatch(r"#### (\d+)", row["rejected"])[1]
            assert guess != truth and abs(int(guess) - int(truth)) <= 4

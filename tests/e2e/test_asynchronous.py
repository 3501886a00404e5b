"""Whole jobs with asynchronous rollouts: evaluation beside training samples, several actors, reward models.

pytest tests/e2e/test_asynchronous.py"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from tests.e2e.jobs import COMMON, Job, replace_flags, train
from tests.e2e.test_ppo_job import reward_flags, reward_folders  # noqa: F401 - a fixture
from tests.e2e.test_resume import rows
from tests.e2e.test_two_actors import DISJOINT
from tests.launch import succeed
from tests.rewards.models import reference_scores, write_classifier

STALE = ("--staleness", "1", "--train-iters", "4", "--num-rollouts-to-log", "-1")
CRITIC = ("--algorithm", "ppo", "--kl-mode", "reward", "--kl-coef", "0.05")


def prompts_of_steps(job: Job, actor: str | None = None) -> list[list[int]]:
    """Step -> visits of its samples, from rollouts/; four samples each."""
    steps = []
    for path in sorted((job.folder / "rollouts").glob("step_*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        counts = Counter(row["sample_id"] // 4 for row in rows if row.get("actor") == actor)
        assert {*counts.values()} == {4}
        steps.append(sorted(counts))
    return steps


@pytest.mark.nightly
def test_an_evaluation_leaves_training_samples_as_they_are_and_scores_as_megarl_eval(sums_data, tmp_path):
    data = str(sums_data / "test.parquet")
    flags = ("--eval-data", data, "--eval-interval", "1", "--eval-num-prompts", "16")
    job = train(sums_data, tmp_path / "run", *STALE, "--rollout-order", "in-order", *flags)
    assert job.returncode == 0, job.output
    assert prompts_of_steps(job) == [[*range(first, first + 4)] for first in range(0, 16, 4)]
    assert [row["staleness/max"] for row in job.steps] == [0, 1, 1, 1]
    scores = ("eval", "--model", job.folder, "--eval-num-prompts", "16", "--json")
    told = succeed("-m", "megarl.cli", *scores, timeout=200, preloaded=True, folder=tmp_path).stdout
    scored, last = json.loads(told)["all"], job.metrics[-1]
    for name in ("reward", "reward_greedy"):  # equal: rounding decides over none of these tokens
        assert scored[name]["value"] == pytest.approx(last[f"eval/{name}"], abs=1e-6)


SLOW_REWARD = """
import time
def share_of_vowels(data_source, solution_str, ground_truth, extra_info):
    time.sleep({seconds})
    return sum(c in "aeiou" for c in solution_str) / 50
"""


@pytest.mark.nightly
def test_a_slow_reward_function_runs_beside_sampling_and_training(sums_data, tmp_path):
    """One process scores one sample after the other, 16 in each step."""
    seconds, file = 0.005, tmp_path / "slow.py"
    file.write_text(SLOW_REWARD.format(seconds=seconds))
    flags = ("--reward-function", f"{file}:share_of_vowels", "--reward-num-workers", "1")
    job = train(sums_data, tmp_path / "run", *STALE, *flags, "--nproc-per-node", "1")
    assert job.returncode == 0, job.output
    rows = [
        json.loads(line)
        for path in (job.folder / "rollouts").glob("step_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert len(rows) == 64
    for row in rows:
        assert row["reward"] == pytest.approx(sum(c in "aeiou" for c in row["response"]) / 50)
    # The engine answers the prompts of two steps together, so those of step 2 are scored while step 1 trains.
    assert job.steps[1]["time/reward_s"] < 0.5 * 16 * seconds


@pytest.mark.nightly
def test_each_of_two_actors_with_critics_trains_on_each_of_its_prompts_once(sums_data, tmp_path):
    job = train(sums_data, tmp_path / "run", *CRITIC, *DISJOINT, *STALE, "--critic-warmup-iters", "1")
    assert job.returncode == 0, job.output
    for actor in (None, "actor_2"):
        assert sorted(visit for step in prompts_of_steps(job, actor) for visit in step) == [*range(16)]
    for key in ("staleness/max", "staleness_2/max"):
        assert max(row[key] for row in job.steps) <= 1
    assert all(row["critic/grad_norm"] > 0 and row["critic_2/grad_norm"] > 0 for row in job.steps)


@pytest.mark.nightly
def test_classifiers_and_a_judge_score_the_samples_of_the_step(
    sums_data,
    tmp_path,
    reward_folders,  # noqa: F811
):
    folders: list[Path] = reward_folders
    flags = (*CRITIC, *reward_flags(folders), "--reward-ranks", "0-1", "1", "0", *STALE)
    job = train(sums_data, tmp_path / "run", *flags)
    assert job.returncode == 0, job.output
    weights = {"reward": 1.0, "reward_model": 1.0, "reward_model_2": 0.5, "reward_model_3": 2.0}
    for row in job.steps:
        if row["reward/failed"] == 0:
            total = sum(weight * row[f"reward/{role}_mean"] for role, weight in weights.items())
            assert row["reward/mean"] == pytest.approx(total, abs=1e-5)
    assert sorted(visit for step in prompts_of_steps(job) for visit in step) == [*range(16)]


APART = (
    *(
        "--nproc-per-node",
        "3",
        "--actor-ranks",
        "0",
        "--rollout-ranks",
        "1",
        "--rollout-backend",
        "transformers",
    ),
    *("--reward-ranks", "2", "--num-rollouts-to-log", "-1", "--staleness", "2"),
)


def samples_of(job: Job) -> list[dict]:
    return [
        json.loads(line)
        for path in sorted((job.folder / "rollouts").glob("step_*.jsonl"))
        for line in path.read_text().splitlines()
    ]


@pytest.mark.nightly
@pytest.mark.timeout(900)  # three jobs of three ranks
@pytest.mark.parametrize("backend", ["transformers", "megatron"])
def test_a_classifier_on_its_own_rank_scores_groups_as_they_finish(sums_data, tmp_path, backend):
    """Every score is that of transformers, one sample at a time; of a replay bit for bit, and after a resume."""
    write_classifier(tmp_path / "model", "qwen2", sums_data / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    flags = (*APART, "--reward-model", str(tmp_path / "model"), "--reward-model-backend", backend)
    flags = (*flags, "--train-iters", "6", "--save-interval", "3", "--keep", "3")
    first = train(sums_data, tmp_path / "first", *flags)
    again = train(sums_data, tmp_path / "again", *flags, "--replay", str(first.folder))
    checkpoint = first.folder / "checkpoints" / "step_000003"
    resumed = train(sums_data, tmp_path / "resumed", *flags, "--load", str(checkpoint))
    for job, num_steps in ((first, 6), (again, 6), (resumed, 3)):
        assert job.returncode == 0, job.output
        found = samples_of(job)
        assert len(found) == 16 * num_steps
        wanted = reference_scores(model, [row["prompt_ids"] + row["response_ids"] for row in found])
        for row, score in zip(found, wanted, strict=True):  # fp32, padded or packed
            assert row["reward_model"]["score"] == pytest.approx(score, abs=1e-5)
            assert row["reward"] == pytest.approx(row["rule_reward"] + score, abs=1e-5)
    assert rows(again) == rows(first)
    # The first step waits for its groups one after another; later ones find their scores.
    assert sum(row["time/reward_model_s"] for row in first.steps) < sum(
        row["time/reward_model_early_s"] for row in first.steps
    )


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_judge_on_its_own_rank_scores_groups_as_they_finish(sums_data, tmp_path, reward_folders):  # noqa: F811
    """A judge that answers nothing leaves the score out; its answers are logged."""
    flags = replace_flags([*reward_flags(reward_folders)], ["--reward-model", str(reward_folders[2])])
    flags = replace_flags(flags, ["--reward-model-weights", "2.0"])
    job = train(sums_data, tmp_path / "run", *APART, *flags, "--reward-model-backend", "judge")
    assert job.returncode == 0, job.output
    found = samples_of(job)
    assert len(found) == 48 and all("answer" in row["reward_model"] for row in found)
    assert {row["reward_model"]["score"] is None for row in found} == {False, True}
    for row in found:
        if (score := row["reward_model"]["score"]) is None:
            assert row["reward"] is None and row["reward_model"]["failure"].startswith(
                "no score in the answer"
            )
        else:
            assert row["reward"] == pytest.approx(row["rule_reward"] + 2.0 * score)


LINES = ["step=1/", "step=9/", "eval step=0/", "eval step=8/"]


@pytest.mark.nightly
@pytest.mark.timeout(1500)  # vLLM starts six engines
@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_an_evaluation_beside_training_has_the_scores_of_its_version(sums_data, tmp_path, backend):
    """The row of an evaluated step has what `megarl eval` says of the weights of that step, though later steps have
    trained meanwhile."""
    data, folder = str(sums_data / "test.parquet"), tmp_path / "run"
    flags = replace_flags(
        [*COMMON, "--model", str(sums_data / "model"), "--train-data", str(sums_data / "train.jsonl")],
        [
            *("--nproc-per-node", "3", "--actor-ranks", "0", "--rollout-ranks", "1-2"),
            *("--rollout-backend", backend, "--rollout-max-num-seqs", "4", "--staleness", "1"),
            *("--train-iters", "16", "--lr", "1e-2", "--save", str(folder)),
            *("--eval-data", data, "--eval-interval", "8", "--eval-num-prompts", "16"),
            *("--eval-num-samples", "3", "--eval-engines", "1"),
        ],
    )
    script = str(Path(__file__).with_name("pinned_loop.py"))
    output = succeed(script, "8,16", *flags, timeout=600, preloaded=True, folder=tmp_path).stdout
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [*range(17)]
    evaluated = {row["step"]: row for row in metrics if "eval/reward" in row}
    assert [*evaluated] == [0, 8, 16]
    assert all(row["staleness/max"] <= 1 and row["canary/max_abs"] < 1e-4 for row in metrics[1:])
    canaries = {row["canary/tokens"] for row in metrics[1:]}
    assert canaries == {32.0, 64.0}, (
        "an engine that keeps older weights samples no canaries, and then it does"
    )
    lines = output.splitlines()
    at = {key: next(i for i, line in enumerate(lines) if line.startswith(key)) for key in LINES}
    assert all(at[f"eval step={step}/"] > at[f"step={step + 1}/"] for step in (0, 8)), "training has waited"
    scores = {}
    for step, model in ((0, sums_data / "model"), (8, folder / "hf_8"), (16, folder / "hf_16")):
        how = ("--temperature", "0.9", "--eval-num-prompts", "16", "--eval-num-samples", "3")
        how = (*how, "--eval-data", data)
        how = (*how, "--max-prompt-length", "32", "--max-response-length", "16")
        how = (*how, "--reward-function", COMMON[-1], "--rollout-backend", backend)
        told = succeed(
            *("-m", "megarl.cli", "eval", "--model", model, *how, "--json"),
            timeout=200,
            preloaded=True,
            folder=tmp_path,
        ).stdout
        scored = json.loads(told)["all"]
        for name in ("reward", "reward_greedy"):  # equal: rounding decides over none of these tokens
            assert evaluated[step][f"eval/{name}"] == pytest.approx(scored[name]["value"], abs=1e-6)
        scores[step] = evaluated[step]["eval/reward"]
    assert len({*scores.values()}) == 3, "versions must differ for this to mean something"

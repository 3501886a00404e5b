"""Two actors in one job, with real engines: each does what it does alone, at the same time as the other.

pytest tests/e2e/test_two_actors.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.role_names import with_suffix
from tests.e2e.jobs import Job, train

GROUPS = ("policy", "critic", "reward", "response", "kl", "advantage", "mismatch", "batch", "eval")
ALONE = ("--nproc-per-node", "1", "--rollout-engine", "out-of-process")
TWO = (
    "--num-actors",
    "2",
    "--actor-ranks",
    "0",
    "--rollout-ranks",
    "0",
    "--actor-2-seed",
    "3",
    "--actor-2-temperature",
    "0.8",
)
PPO = (
    "--algorithm",
    "ppo",
    "--kl-mode",
    "reward",
    "--kl-coef",
    "0.05",
    "--train-iters",
    "2",
    "--num-rollouts-to-log",
    "2",
)
DISJOINT = (
    *TWO,
    "--critic-ranks",
    "0",
    "--actor-2-ranks",
    "1",
    "--rollout-2-ranks",
    "1",
    "--critic-2-ranks",
    "1",
)


CALLS = ("rollout{}.generate", "actor{}.log_probs", "critic{}.values", "actor{}.update", "critic{}.update")


def spans(run: Path, *names: str) -> list[tuple[float, float]]:
    """(begin, end) in seconds of each call of these names, once per call."""
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    return sorted({(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["name"] in names})


def overlap_s(run: Path, one: str, *others: str) -> float:
    """Seconds in which the call `one` and any of the others run at the same time."""
    return sum(
        max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans(run, one) for b in spans(run, *others)
    )


@pytest.fixture(scope="module")
def evaluated(sums_data) -> tuple[str, ...]:
    """Flags of an evaluation of four prompts after the last step."""
    test = str(sums_data / "test.parquet")
    return ("--eval-data", test, "--eval-interval", "2", "--eval-num-prompts", "4")


@pytest.fixture(scope="module")
def both(sums_data, evaluated, tmp_path_factory) -> Job:
    """The job of two actors, each on a rank of its own."""
    job = train(sums_data, tmp_path_factory.mktemp("two") / "both", *PPO, *evaluated, *DISJOINT)
    assert job.returncode == 0, job.output
    return job


@pytest.mark.nightly
@pytest.mark.parametrize("number", [1, 2])
def test_an_actor_on_a_rank_of_its_own_does_what_it_does_alone(both, evaluated, sums_data, tmp_path, number):
    """Metrics and exported weights to the last bit."""
    suffix, flags = {1: ("", ()), 2: ("_2", ("--seed", "3", "--temperature", "0.8"))}[number]
    job = train(sums_data, tmp_path / "alone", *PPO, *evaluated, *ALONE, *flags)
    assert job.returncode == 0, job.output
    for alone, together in zip(job.metrics, both.metrics, strict=True):
        names = [name for name in alone if name.split("/")[0] in GROUPS]
        assert {name: together[with_suffix(name, suffix)] for name in names} == {
            name: alone[name] for name in names
        }
    weights = [
        (folder / "model.safetensors").read_bytes()
        for folder in (job.folder / "hf", both.folder / f"hf{suffix}")
    ]
    assert weights[0] == weights[1]


def test_two_actors_on_ranks_of_their_own_work_at_the_same_time(both):
    assert "warn" not in both.output.lower(), both.output
    assert len(both.steps) == 2 and both.steps[0]["policy/loss"] != both.steps[0]["policy_2/loss"]
    rows = [
        json.loads(line) for line in (both.folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert [(row.get("actor"), row["sample_id"]) for row in rows] == [
        (None, 0),
        (None, 1),
        ("actor_2", 0),
        ("actor_2", 1),
    ]
    assert overlap_s(both.folder, "rollout.generate", "rollout_2.generate") > 0
    # which of the two is ahead is a matter of load; what it does then is another part of its step
    first = [call.format("") for call in CALLS]
    second = [call.format("_2") for call in CALLS]
    assert (
        overlap_s(both.folder, "actor.update", *second) + overlap_s(both.folder, "actor_2.update", *first) > 0
    )


@pytest.mark.nightly
def test_two_actors_share_ranks_with_other_layouts(sums_data, tmp_path):
    """The first over both ranks, the second on rank 0 by GRPO: what the second does is what it does alone."""
    grpo = ("--train-iters", "2", "--kl-mode", "none")
    both = train(
        sums_data,
        tmp_path / "both",
        *PPO,
        "--num-actors",
        "2",
        "--rollout-ranks",
        "0-1",
        "--rollout-2-ranks",
        "1",
        "--actor-2-ranks",
        "0",
        "--tensor-model-parallel-size",
        "2",
        "--actor-2-tensor-model-parallel-size",
        "1",
        "--rollout-tensor-parallel-size",
        "2",
        "--rollout-2-tensor-parallel-size",
        "1",
        "--actor-2-algorithm",
        "grpo",
        "--actor-2-kl-mode",
        "none",
        "--actor-2-kl-coef",
        "0",
        "--actor-2-seed",
        "3",
    )
    assert both.returncode == 0, both.output
    alone = train(sums_data, tmp_path / "alone", *grpo, *ALONE, "--seed", "3")
    assert alone.returncode == 0, alone.output
    for by_itself, together in zip(alone.metrics, both.metrics, strict=True):
        names = [name for name in by_itself if name.split("/")[0] in GROUPS]
        assert {
            name: together[with_suffix(name, "_2")]
            for name in names
            if not name.startswith("batch/bytes") and name != "batch/samples_moved"
        } == {
            name: by_itself[name]
            for name in names
            if not name.startswith("batch/bytes") and name != "batch/samples_moved"
        }
        assert "critic/loss" in together and "critic_2/loss" not in together

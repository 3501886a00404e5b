"""Every algorithm, with staleness 0 and 1, in one turn and in several: two steps, or the reason why not.

    pytest tests/e2e/test_algorithm_matrix.py -m nightly

The combinations are generated from the registry, so a new algorithm is tried in all of them. What must train
is what the table of docs/algorithms.md says, from the same function."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.algorithms.listing import WAYS, Way, ways
from sums.files import write_labelled
from tests.e2e.jobs import train
from tests.launch import command_line

pytestmark = pytest.mark.nightly
ENV = f"{Path(__file__).with_name('envs.py')}:LowerCase"
AGENT = command_line("-S", Path(__file__).with_name("slow_agent.py"))
SEVERAL = ("--max-turns", "3", "--max-context-length", "72", "--max-response-length", "8")
TURNS = {
    "one turn": (),
    "several turns": ("--env", ENV, *SEVERAL, "--reward-max-failed-share", "1"),
}
COSTS = f"{Path(__file__).with_name('cost_reward.py')}:letters"
REASONS = ("--staleness (1)", f"--env ({ENV})")
"""Flags that a refusal names."""


def data_of(name: str, sums_data: Path, folder: Path) -> tuple[str, ...]:
    """Flags of the data set, where rows of prompts do not do."""
    needs, pairs = REGISTRY[name].row_needs, sums_data / "pairs.jsonl"
    if REGISTRY[name].needs_rollout:
        return ()
    if needs == "labelled":
        pairs = write_labelled(pairs, folder / "labelled.jsonl")
    return "--train-data", str(sums_data / "sft_worked.jsonl" if needs == "response" else pairs)


@pytest.mark.parametrize("name, way", itertools.product(REGISTRY, WAYS), ids=lambda one: str(one))
def test_it_trains_or_says_why_not(sums_data, tmp_path, name, way: Way):
    flags = ["--algorithm", name, "--staleness", str(way.staleness), "--train-iters", "2"]
    if way.turns == "several turns" and REGISTRY[name].needs_cost_critic:
        # An environment gives one reward. The cost is a score of a rule, which judges an agent's last answer.
        flags += ["--agent-command", AGENT, *SEVERAL]
    else:
        flags += TURNS[way.turns]
    flags += data_of(name, sums_data, tmp_path)
    if REGISTRY[name].is_taught:
        flags += ["--reference-model", str(sums_data / "model")]
    if REGISTRY[name].one_update:
        flags += ["--global-batch-size", "16"]
    if way.turns == "one turn" and not REGISTRY[name].needs_rollout:
        flags += ["--max-response-length", "48"]
    if REGISTRY[name].needs_cost_critic:
        flags += ["--reward-function", COSTS, "--score-weights", "letters=1", "cost=0"]
    job = train(sums_data, tmp_path / "run", *flags)
    if way not in ways(name):
        assert job.returncode == 2 and any(reason in job.output for reason in REASONS), job.output
        return
    assert job.returncode == 0, job.output
    steps = [row for row in job.metrics if "policy/loss" in row]
    assert len(steps) == 2
    for row in steps:
        assert math.isfinite(row["policy/loss"]) and math.isfinite(row["policy/grad_norm"])
        # with staleness a step may have no token of its version; without a rollout there is nothing to compare
        assert row.get("mismatch/max_abs", 0.0) <= 1e-4
    if not REGISTRY[name].is_taught:  # the teacher is the model itself, so that nothing is learnt
        assert any(row["policy/grad_norm"] > 0 for row in steps)

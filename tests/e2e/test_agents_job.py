"""A whole job whose episodes are played by an agent over HTTP, and the same job with an environment class.

pytest tests/e2e/test_agents_job.py -m nightly"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, train
from tests.e2e.test_cli_jobs import MEASURED

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
FLAGS = (
    *("--max-turns", "3", "--max-context-length", "72", "--max-response-length", "8", "--num-prompts", "2"),
    *("--num-rollouts-to-log", "-1", "--train-iters", "1"),
)


AGENTS = {
    "openai": (EXAMPLES / "calculator_agent.py",),
    "anthropic": (HERE / "anthropic_agent.py",),
    "with a parser": (f"{HERE / 'anthropic_agent.py'} tools", "--tool-call-parser", "hermes"),
}
"""Agent, and the flags that it needs. The untrained model calls no tools, and its chat template shows
none."""


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_rule_judges_the_last_answer_of_each_episode(sums_data, tmp_path):
    command = f"{sys.executable} {EXAMPLES / 'calculator_agent.py'}"
    rule = f"{HERE / 'last_answer.py'}:reward"
    job = job_of(sums_data, tmp_path / "run", "--agent-command", command, "--reward-function", rule)
    rows = rows_of(job)
    lasts = [[turn["content"] for turn in row["turns"] if turn["role"] == "assistant"][-1] for row in rows]
    assert [row["reward"] for row in rows] == [pytest.approx(len(last) / 1000) for last in lasts]
    assert any(row["num_turns"] > 1 for row in rows) and job.steps[0]["reward/failed"] == 0


@pytest.fixture(scope="module")
def as_class(sums_data, tmp_path_factory) -> Job:
    env = f"{EXAMPLES / 'calculator_env.py'}:Calculator"
    flags = ("--env", env, "--env-python", sys.executable)
    return job_of(sums_data, tmp_path_factory.mktemp("agents") / "class", *flags)


def job_of(data: Path, save: Path, *flags: str) -> Job:
    done = train(data, save, *FLAGS, *flags)
    assert done.returncode == 0, done.output
    return done


def rows_of(job: Job) -> list[dict]:
    path = job.folder / "rollouts" / "step_000001.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gives_the_tokens_advantages_and_loss_of_the_environment(
    sums_data, as_class, tmp_path, name
):
    """The calculator as a class, and as an agent on an SDK: the metrics of the first step are equal."""
    agent, *flags = AGENTS[name]
    command = f"{sys.executable} {agent}"
    flags = ["--agent-command", command, "--agent-num-processes", "2", *flags]
    as_agent = job_of(sums_data, tmp_path / "agent", *flags)
    for one, other in zip(rows_of(as_class), rows_of(as_agent), strict=True):
        for name in ("prompt_ids", "response_ids", "holes", "reward", "num_turns", "finish_reason"):
            assert one[name] == other[name], name
    (one,), (other,) = as_class.steps, as_agent.steps
    # the engine's log-probs depend on which requests share a batch, in the last bits
    names = [name for name in one if not name.startswith((*MEASURED, "mismatch/"))]
    assert {name: one[name] for name in names} == {name: other[name] for name in names}
    assert max(one["mismatch/max_abs"], other["mismatch/max_abs"]) < 5e-5
    assert one["reward/failed"] == 0 and one["turns/max"] > 1


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_branches_of_an_episode_are_trained_on_together(sums_data, tmp_path):
    """A whole job: the log-prob gate holds on every branch, and its invariants find each token once."""
    command = f"{sys.executable} -S {HERE / 'branching_agent.py'}"
    flags = ("--agent-command", command, "--loss-aggregation", "seq-mean-token-mean")
    job = train(sums_data, tmp_path / "run", "--max-turns", "5", *FLAGS[2:], *flags)
    assert job.returncode == 0, job.output
    (step,), rows = job.steps, rows_of(job)
    branches = [row["num_branches"] for row in rows]
    assert {2, 4} == set(branches) == {1 + len(row["branches"]) for row in rows}
    assert step["branches/mean"] == pytest.approx(sum(branches) / len(rows)) and step["branches/max"] == 4
    assert step["mismatch/max_abs"] < 5e-5 and step["reward/failed"] == 0
    tokens = 0
    for row in rows:
        samples = [row, *row["branches"]]
        sampled = [
            len(one["response_ids"]) - sum(end - start for start, end in one["holes"]) for one in samples
        ]
        assert sum(sampled) == row["response_length"] and min(sampled) > 0
        tokens += sum(len(one["prompt_ids"] + one["response_ids"]) for one in samples)
        assert [turn["role"] for turn in row["turns"]] == ["assistant", "user", "assistant"]
        if row["num_branches"] == 4:  # the first answer is context in the branch that goes on from it
            first, later = row["prompt_ids"] + row["response_ids"], row["branches"][0]["prompt_ids"]
            start = len(row["prompt_ids"]) + row["holes"][0][0]
            assert later[:start] == first[:start] and len(later) > start
    assert step["batch/tokens"] == tokens
    assert step["mismatch/tokens"] == sum(row["response_length"] for row in rows)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_all_branches_of_a_greedy_episode_are_scored_and_not_trained_on(sums_data, tmp_path):
    """ReMax: one more episode per prompt, with two or more samples, of which none is trained on."""
    command = f"{sys.executable} -S {HERE / 'branching_agent.py'}"
    flags = ("--agent-command", command, "--algorithm", "remax", "--policy-loss", "reinforce")
    job = train(sums_data, tmp_path / "run", "--max-turns", "5", *FLAGS[2:], *flags)
    assert job.returncode == 0, job.output
    (step,), rows = job.steps, rows_of(job)
    trained, untrained = ([row for row in rows if row.get("trained", True) is one] for one in (True, False))
    assert (len(trained), len(untrained)) == (8, 2)  # 2 prompts x (4 sampled + the greedy one)
    assert min(row["num_branches"] for row in rows) > 1
    assert step["untrained/samples"] == 2
    assert step["untrained/tokens"] == sum(row["response_length"] for row in untrained)
    assert step["mismatch/tokens"] == sum(row["response_length"] for row in trained)
    assert step["untrained/reward_mean"] == pytest.approx(sum(row["reward"] for row in untrained) / 2)
    assert step["reward/mean"] == pytest.approx(sum(row["reward"] for row in trained) / 8)

"""A whole job whose episodes are played by an agent over HTTP, and the same job with an environment class, and with
one of the package verifiers.

    MEGARL_TEST_VERIFIERS_PYTHON=path/to/venv/bin/python pytest tests/e2e/test_agents_job.py -m nightly

Without the variable the tests of verifiers are skipped; tests/episodes/test_verifiers.py says what the venv needs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.episodes import verifiers_env
from tests.e2e.jobs import Job, replace_flags, train
from tests.e2e.test_cli_jobs import MEASURED
from tests.e2e.test_resume import rows as compared
from tests.launch import command_line

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
PYTHON, TASKS = os.environ.get("MEGARL_TEST_VERIFIERS_PYTHON"), HERE.parent / "episodes" / "verifiers_tasks"
FLAGS = (
    *("--max-turns", "3", "--max-context-length", "72", "--max-response-length", "8", "--num-prompts", "2"),
    *("--num-rollouts-to-log", "-1", "--train-iters", "1"),
)
STEPS = ("--train-iters", "3")


AGENTS = {
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "with a parser": ("anthropic tools", "--tool-call-parser", "hermes"),
}
"""Arguments of letters_agent.py, and the flags that it needs. The untrained model calls no tools, and its chat template shows
none."""


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_rule_judges_the_last_answer_of_each_episode(sums_data, tmp_path):
    command = command_line(EXAMPLES / "calculator_agent.py")
    rule = f"{HERE / 'last_answer.py'}:reward"
    job = job_of(sums_data, tmp_path / "run", "--agent-command", command, "--reward-function", rule)
    rows = rows_of(job)
    lasts = [[turn["content"] for turn in row["turns"] if turn["role"] == "assistant"][-1] for row in rows]
    assert [row["reward"] for row in rows] == [pytest.approx(len(last) / 1000) for last in lasts]
    assert any(row["num_turns"] > 1 for row in rows) and job.steps[0]["reward/failed"] == 0


@pytest.fixture(scope="module")
def as_class(sums_data, tmp_path_factory) -> Job:
    flags = ("--env", f"{HERE / 'letters.py'}:Letters", "--env-python", sys.executable, *STEPS)
    return job_of(sums_data, tmp_path_factory.mktemp("agents") / "class", *flags)


def job_of(data: Path, save: Path, *flags: str) -> Job:
    done = train(data, save, *replace_flags([*FLAGS], [*flags]))
    assert done.returncode == 0, done.output
    return done


def rows_of(job: Job, step: int = 1) -> list[dict]:
    path = job.folder / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gives_the_tokens_advantages_and_loss_of_the_environment(
    sums_data, as_class, tmp_path, name
):
    """The game of letters.py as a class, and as an agent on an SDK."""
    agent, *flags = AGENTS[name]
    command = command_line(HERE / "letters_agent.py", *shlex.split(agent))
    flags = ["--agent-command", command, "--agent-num-processes", "2", *flags, *STEPS]
    check_same(as_class, job_of(sums_data, tmp_path / "agent", *flags))


def check_same(as_class: Job, other_job: Job) -> None:
    """All steps of two jobs have the same tokens and rewards; the metrics are equal in the first one, and but for
    rounding after updates.

    Which turns share a batch of the engine changes its logits in the last bits, about 1e-6: that decides over a token
    once in a million, not among these few hundred. `mismatch/*` and the entropy, which is the mean of the engine's
    log-probs here, show it."""
    assert len(as_class.steps) == len(other_job.steps) == 3
    for step, (one, other) in enumerate(zip(as_class.steps, other_job.steps, strict=True), 1):
        for row, same in zip(rows_of(as_class, step), rows_of(other_job, step), strict=True):
            for name in ("prompt_ids", "response_ids", "holes", "reward", "num_turns", "finish_reason"):
                assert row[name] == same[name], (step, name)
        names = [name for name in one if not name.startswith((*MEASURED, "mismatch/"))]
        wanted, found = ({name: job[name] for name in names} for job in (one, other))
        assert found.pop("policy/entropy") == pytest.approx(wanted.pop("policy/entropy"), abs=1e-5)
        assert found == (wanted if step == 1 else pytest.approx(wanted, rel=1e-3, abs=1e-6)), step
        assert max(one["mismatch/max_abs"], other["mismatch/max_abs"]) < 5e-5
        assert one["reward/failed"] == 0 and one["turns/max"] > 1
        assert one["advantage/max_abs"] > 0 and one["policy/grad_norm"] > 0


@pytest.fixture
def as_verifiers(sums_data, tmp_path, monkeypatch) -> list[str]:
    """Flags of the game as an environment of verifiers, with its tasks in the order of the rows."""
    if PYTHON is None:
        pytest.skip("MEGARL_TEST_VERIFIERS_PYTHON names no Python with verifiers")
    monkeypatch.setenv("PYTHONPATH", str(TASKS))
    monkeypatch.setenv("MEGARL_TEST_ROWS", str(sums_data / "train.jsonl"))
    rows = tmp_path / "rows.jsonl"
    command = [PYTHON, verifiers_env.__file__, "megarl_letters", rows]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = [json.loads(line) for line in (sums_data / "train.jsonl").read_text().splitlines()]
    made = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["prompt"] for row in made] == [row["prompt"] for row in given]
    return ["--env-verifiers", "megarl_letters", "--env-python", PYTHON, "--train-data", str(rows)]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_verifiers_environment_gives_the_tokens_advantages_and_loss_of_the_class(
    sums_data, as_class, as_verifiers, tmp_path
):
    check_same(as_class, job_of(sums_data, tmp_path / "run", *as_verifiers, *STEPS))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", ["eval", "train"])
def test_a_job_of_verifiers_trains_evaluates_and_resumes(sums_data, as_verifiers, tmp_path, client):
    """The gate holds over all answers. What verifiers renders with the client `train` is its own affair, so those
    episodes may have several samples."""
    rows = as_verifiers[-1]
    flags = (*as_verifiers, "--env-verifiers-client", client, "--save-interval", "1")
    flags += ("--eval-data", rows, "--eval-interval", "2", "--eval-num-prompts", "3")
    job = job_of(sums_data, tmp_path / "run", *flags, "--train-iters", "1")
    if client == "eval":
        more = ("--train-iters", "2", "--load", str(tmp_path / "run"))
        job = job_of(sums_data, tmp_path / "run", *flags, *more)
    assert [step["step"] for step in job.steps] == ([1, 2] if client == "eval" else [1])
    for step in job.steps:
        assert step["mismatch/max_abs"] < 5e-5 and step["reward/failed"] == 0 and step["turns/max"] > 1
        assert step["branches/max"] == 1 or client == "train"
    held_out = [row for row in job.metrics if "eval/turns" in row]
    assert len(held_out) == 1 + len(job.steps) and all(row["eval/turns"] >= 1 for row in held_out)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_rollouts_of_verifiers_go_on_while_the_actor_trains_and_can_be_replayed(
    sums_data, as_verifiers, tmp_path
):
    flags = (*as_verifiers, "--staleness", "1", "--train-iters", "3")
    job = job_of(sums_data, tmp_path / "run", *flags)
    for step in job.steps:
        assert step["staleness/max"] <= 1 and step["reward/failed"] == 0 and step["canary/max_abs"] < 1e-3
    assert len(job.steps) == 3 and max(step["staleness/max"] for step in job.steps) == 1
    again = job_of(sums_data, tmp_path / "again", *flags, "--replay", str(job.folder))
    assert compared(again) == compared(job)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_branches_of_an_episode_are_trained_on_together(sums_data, tmp_path):
    """A whole job: the log-prob gate holds on every branch, and its invariants find each token once."""
    command = command_line("-S", HERE / "branching_agent.py")
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
    command = command_line("-S", HERE / "branching_agent.py")
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

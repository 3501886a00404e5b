"""Whole jobs whose episodes go on while a step trains: environments, agents, checkpoints and replays.

pytest tests/e2e/test_episodes_streaming.py -m nightly"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from megarl.messages import decode
from megarl.rollout.replay_log import Turns, read_log
from megarl.workers.open_episode import SavedEpisode
from tests.e2e.jobs import LAYOUTS, Job, replace_flags, train
from tests.e2e.test_resume import rows
from tests.launch import command_line

HERE = Path(__file__).resolve().parent
ENV = f"{HERE / 'envs.py'}:Slow"
AGENT = command_line(HERE / "slow_agent.py")
TREES = command_line("-S", HERE / "branching_agent.py", "slow")
NUM_PROMPTS, NUM_SAMPLES, STEPS = 4, 4, 4
FLAGS = (
    *("--max-turns", "4", "--max-context-length", "72", "--max-response-length", "8"),
    *("--num-rollouts-to-log", "-1", "--train-iters", str(STEPS), "--save-interval", "2", "--keep", "3"),
    *("--eval-interval", "2", "--eval-num-prompts", "4"),
)
LIMIT = 1e-3  # of the log-probs of engine and trainer in fp32, as the gate's
DISJOINT = LAYOUTS["rank_0_to_rank_1"]


def run(data: Path, folder: Path, *flags: str) -> Job:
    own = () if {"--agent-command"} & {*flags} else ("--env", ENV)
    held_out = ("--eval-data", str(data / "train.jsonl"))
    job = train(data, folder, *replace_flags([*FLAGS, *own, *held_out], ["--staleness", "1", *flags]))
    assert job.returncode == 0, job.output
    return job


def episodes(folder: Path, steps: range) -> list[dict]:
    """Return the logged episodes of these steps. Each step has whole groups."""
    found = []
    for step in steps:
        lines = (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        of_step = [json.loads(line) for line in lines]
        groups = Counter(row["sample_id"] // NUM_SAMPLES for row in of_step)
        assert [*groups.values()] == [NUM_SAMPLES] * NUM_PROMPTS
        found += of_step
    return found


def check_run(job: Job, first: int = 1) -> list[dict]:
    """Check ages, gate, canaries and that each prompt is trained on once."""
    assert [row["step"] for row in job.steps] == [*range(first, STEPS + 1)]
    for row in job.steps:
        assert row["staleness/max"] <= 1 and row["reward/failed"] == 0
        assert row.get("mismatch/max_abs", 0.0) <= LIMIT and row["canary/max_abs"] <= LIMIT
    assert any("mismatch/max_abs" in row for row in job.steps)
    assert max(row["turns/max"] for row in job.steps) > 1
    played = episodes(job.folder, range(1, STEPS + 1))
    ids = [row["sample_id"] for row in played]
    assert sorted(ids) == [*range(STEPS * NUM_PROMPTS * NUM_SAMPLES)]
    return played


def check_trees(job: Job, played: list[dict], are_trees: bool) -> None:
    """Each episode of the branching agent has all its answers in its branches, which a step counts once."""
    assert max(row.get("branches/max", 1) for row in job.steps) == (5 if are_trees else 1)
    for row in played if are_trees else ():
        samples = [row, *row["branches"]]
        assert len(samples) == row["num_branches"] in (3, 5)
        assert row["num_turns"] == (4 if len(samples) == 3 else 6)
        holes = sum(end - start for one in samples for start, end in one["holes"])
        assert sum(len(one["response_ids"]) for one in samples) - holes == row["response_length"]


FORMS = {
    "recompute": (),
    "keep": ("--weight-update", "keep"),
    "wait": ("--weight-update", "wait"),
    "disjoint": DISJOINT,
    "inline": ("--nproc-per-node", "1", "--executor", "inline"),
    "transformers": ("--rollout-backend", "transformers"),
    "agents": ("--agent-command", AGENT, "--eval-interval", "4"),
    "agents_disjoint": (*DISJOINT, "--agent-command", AGENT, "--eval-interval", "4"),
    "agents_trees": ("--agent-command", TREES, "--max-turns", "6", "--eval-interval", "4"),
    "agents_trees_disjoint": (
        *(*DISJOINT, "--agent-command", TREES, "--max-turns", "6", "--eval-interval", "4"),
        *("--loss-aggregation", "seq-mean-token-mean"),
    ),
}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMS)
def test_episodes_of_slow_environments_are_trained_on_once_and_in_time(sums_data, tmp_path, form):
    """Some span versions; a checkpoint in the middle loses and doubles none."""
    job = run(sums_data, tmp_path / "run", *FORMS[form])
    check_trees(job, check_run(job), "trees" in form)
    assert max(row["staleness/max"] for row in job.steps) == 1
    for name in [path.stem for path in (job.folder / "engines").glob("rollout_*.jsonl")]:
        assert any(isinstance(record, Turns) for record in read_log(job.folder, name))
    for step in range(3, STEPS + 1):
        shutil.rmtree(job.folder / "checkpoints" / f"step_{step:06d}", ignore_errors=True)
    files = (job.folder / "checkpoints" / "step_000002" / "requests").iterdir()
    saved = [one for path in files for one in decode(path.read_bytes(), list[SavedEpisode])]
    has_begun = any(one.finish_reason is None and one.events for one in saved)
    before = episodes(job.folder, range(1, 3))
    resumed = run(sums_data, tmp_path / "run", *FORMS[form], "--load", str(job.folder))
    assert "continues after step 2" in resumed.output
    played = check_run(resumed)
    assert played[: len(before)] == before
    check_trees(resumed, played, "trees" in form)
    assert ("cannot be brought back" in resumed.output) == (has_begun and "agents" in form)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_rule_judges_the_last_answer_of_each_agent_while_training_goes_on(sums_data, tmp_path):
    rule = ("--reward-function", f"{HERE / 'last_answer.py'}:reward")
    job = run(sums_data, tmp_path / "run", "--agent-command", AGENT, *rule)
    for row in check_run(job):
        last = [turn["content"] for turn in row["turns"] if turn["role"] == "assistant"][-1]
        assert row["reward"] == pytest.approx(len(last) / 1000)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["recompute", "disjoint", "agents", "agents_trees", "agents_trees_disjoint"])
def test_a_replay_asks_no_environment_and_resumes_bit_for_bit(sums_data, tmp_path, form):
    """The environment's replies depend on the time, so only the log can repeat them."""
    flags = [flag.replace(":Slow", ":Clock") for flag in FORMS[form]]
    flags += [] if "agents" in form else ["--env", ENV.replace(":Slow", ":Clock")]
    first = run(sums_data, tmp_path / "first", *flags)
    again = run(sums_data, tmp_path / "again", *flags, "--replay", str(first.folder))
    assert rows(again) == rows(first)
    assert episodes(again.folder, range(1, STEPS + 1)) == episodes(first.folder, range(1, STEPS + 1))
    for step in range(3, STEPS + 1):
        shutil.rmtree(again.folder / "checkpoints" / f"step_{step:06d}", ignore_errors=True)
    resumed = run(
        sums_data, tmp_path / "again", *flags, "--replay", str(first.folder), "--load", str(again.folder)
    )
    assert "continues after step 2" in resumed.output
    assert rows(resumed) == rows(first)

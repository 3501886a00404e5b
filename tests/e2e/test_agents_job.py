"""A whole job whose episodes are played by an agent over HTTP, and the same job with an environment class.

pytest tests/e2e/test_agents_job.py -m nightly"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, train
from tests.e2e.test_cli_jobs import MEASURED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FLAGS = (
    *("--max-turns", "3", "--max-context-length", "72", "--max-response-length", "8", "--num-prompts", "2"),
    *("--num-rollouts-to-log", "-1", "--train-iters", "1"),
)


def job_of(data: Path, save: Path, *flags: str) -> Job:
    done = train(data, save, *FLAGS, *flags)
    assert done.returncode == 0, done.output
    return done


def rows_of(job: Job) -> list[dict]:
    path = job.folder / "rollouts" / "step_000001.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_an_agent_gives_the_tokens_advantages_and_loss_of_the_environment(sums_data, tmp_path):
    """The calculator as a class, and as an agent on OpenAI's SDK: the metrics of the first step are equal."""
    as_class = job_of(sums_data, tmp_path / "class", "--env", f"{EXAMPLES / 'calculator_env.py'}:Calculator")
    command = f"{sys.executable} {EXAMPLES / 'calculator_agent.py'}"
    as_agent = job_of(sums_data, tmp_path / "agent", "--agent-command", command, "--agent-num-processes", "2")
    for one, other in zip(rows_of(as_class), rows_of(as_agent), strict=True):
        for name in ("prompt_ids", "response_ids", "holes", "reward", "num_turns", "finish_reason"):
            assert one[name] == other[name], name
    (one,), (other,) = as_class.steps, as_agent.steps
    # the engine's log-probs depend on which requests share a batch, in the last bits
    names = [name for name in one if not name.startswith((*MEASURED, "mismatch/"))]
    assert {name: one[name] for name in names} == {name: other[name] for name in names}
    assert max(one["mismatch/max_abs"], other["mismatch/max_abs"]) < 5e-5
    assert one["reward/failed"] == 0 and one["turns/max"] > 1

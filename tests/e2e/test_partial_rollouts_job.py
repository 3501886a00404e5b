"""A job with --max-tokens-per-step: responses are sampled in parts by several versions, none is lost, and
each step still gets its prompts.

pytest tests/e2e/test_partial_rollouts_job.py -m nightly"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.launch import succeed

STALENESS, NUM_STEPS, NUM_SAMPLES_OF_STEP = 2, 5, 16  # the last as in COMMON
ENGINES = {
    "transformers": ("--rollout-backend", "transformers"),
    "vllm": (),
    "disjoint": ("--actor-ranks", "0", "--rollout-ranks", "1", "--weight-update", "keep"),
}


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
def test_responses_come_in_parts(engine, sums_data, tmp_path):
    """The untrained model ends hardly any response, so all of them meet the limit."""
    flags = ["--train-iters", str(NUM_STEPS), "--staleness", str(STALENESS), "--max-tokens-per-step", "6"]
    flags += ["--model", str(sums_data / "model"), "--train-data", str(sums_data / "train.jsonl")]
    flags += ["--num-rollouts-to-log", "-1", "--save", str(tmp_path / "run"), *ENGINES[engine]]
    succeed("-P", "-m", "megarl.cli", "train", *replace_flags(COMMON, flags), timeout=300, preloaded=True)
    steps = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["staleness/mixed"] for row in steps if row["step"] == 1] == [0.0], "the first groups are due"
    later = [row for row in steps if row["step"] > STALENESS]
    assert all(row["staleness/mixed"] > 0.5 and row["staleness/max"] == STALENESS for row in later)
    # A response of 16 tokens has at most 6 of each version before the one at which it is due.
    assert all(row[f"staleness/share_{age}"] <= 0.5 for row in later for age in (1, 2))
    trained = Counter(
        row["sample_id"]
        for step in range(1, NUM_STEPS + 1)
        for row in rows(tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl")
    )
    assert trained == Counter(range(NUM_STEPS * NUM_SAMPLES_OF_STEP))

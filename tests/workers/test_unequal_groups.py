"""Groups of 1, 3 and 5 samples go through distribution, advantages, their reference and the update (two ranks).

pytest tests/workers/test_unequal_groups.py"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.workers.role_steps import WORLD_SIZE, run_on_ranks
from tests.workers.run_unequal_groups import GROUPS, unequal_rows


def expected_advantages() -> dict[str, float | None]:
    """Return (reward - mean) / (standard deviation + 1e-4) within each group; None where the reward failed."""
    rows, advantages = unequal_rows(), {}
    for group in GROUPS:
        rewards = [r["reward"] for r in rows if r["group"] == group and r["reward"] is not None]
        for row in rows:
            if row["group"] != group:
                continue
            if row["reward"] is None:
                advantages[str(row["sample"])] = None
            elif len(rewards) == 1:
                advantages[str(row["sample"])] = 0.0
            else:
                deviation = row["reward"] - statistics.mean(rewards)
                advantages[str(row["sample"])] = deviation / (statistics.stdev(rewards) + 1e-4)
    return advantages


def test_groups_of_one_three_and_five_samples(tmp_path, sums_data):
    run_on_ranks(Path(__file__).with_name("run_unequal_groups.py"), tmp_path, sums_data)
    reports = [json.loads((tmp_path / f"report_{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    found = {sample: value for report in reports for sample, value in report["advantages"].items()}
    expected = expected_advantages()
    assert found.keys() == expected.keys() and all(report["advantages"] for report in reports)
    for sample, advantage in expected.items():
        if advantage is None:
            assert found[sample] != found[sample]  # NaN: the sample is left out of the loss
        else:
            assert found[sample] == pytest.approx(advantage, abs=1e-6)
    metrics = reports[0]["metrics"]
    assert metrics == reports[1]["metrics"]
    assert metrics["advantage/max_abs"] == pytest.approx(
        max(abs(a or 0.0) for a in expected.values()), abs=1e-6
    )
    assert metrics["reward/failed"] == 1.0
    for report in reports:
        by_division, of_another = report["refused"]
        assert "belongs to another sample" in by_division
        assert "where it was sampled, and 12 in the driver" in of_another

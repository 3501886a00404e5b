"""Groups of 1, 3 and 5 samples go through distribution, advantages, their reference and the update (two ranks).

pytest tests/workers/test_unequal_groups.py"""

from __future__ import annotations

import json
import math
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


def check_gaps(reports: list[dict]) -> None:
    """Compare mismatch/* and off_policy/* with sums over the tokens of one version or of the others."""
    rows = {row["sample"]: row for row in unequal_rows()}
    tokens = [token for report in reports for token in report["gaps"]["all are current"][1]]
    tokens = {(token["sample_id"], token["position"]): token for token in tokens}
    gap_of = {}
    for sample, row in rows.items():
        for index, version in enumerate(row["versions"]):
            token = tokens[sample, len(row["prompt"]) + index]
            is_whole = set(row["versions"]) == {2}
            gap_of[sample, index] = version, is_whole, token["trainer"] - token["engine"]
    kept = {
        "recompute": [key for key, (version, _, _) in gap_of.items() if version == 2],
        "keep": [key for key, (_, is_whole, _) in gap_of.items() if is_whole],
        "wait": [key for key, (_, is_whole, _) in gap_of.items() if is_whole],
        "none is current": [],
        "all are current": [*gap_of],
    }
    assert len(gap_of) > len(kept["recompute"]) > len(kept["keep"]) > 0
    for how, current in kept.items():
        metrics = reports[0]["gaps"][how][0]
        assert metrics == reports[1]["gaps"][how][0]
        for group, keys in {"mismatch": current, "off_policy": gap_of.keys() - {*current}}.items():
            gaps = [gap_of[key][2] for key in keys]
            if not gaps:
                names = {name for name in metrics if name.startswith(group)}
                assert names == ({"mismatch/tokens"} if group == "mismatch" else set())
                assert metrics["mismatch/tokens"] == len(current)
                continue
            assert metrics[f"{group}/tokens"] == len(gaps)
            expected = {
                "mean_abs": sum(map(abs, gaps)) / len(gaps),
                "max_abs": max(map(abs, gaps)),
                "kl": sum(math.expm1(gap) - gap for gap in gaps) / len(gaps),
            }
            for name, value in expected.items():
                assert metrics[f"{group}/{name}"] == pytest.approx(value, rel=1e-5), (how, group, name)
        if how in ("recompute", "keep", "wait"):
            worst = [token for report in reports for token in report["gaps"][how][1]]
            found = {
                (one["sample_id"], one["position"] - len(rows[one["sample_id"]]["prompt"])) for one in worst
            }
            assert len(found) == WORLD_SIZE and found <= {*current}


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
    check_gaps(reports)
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

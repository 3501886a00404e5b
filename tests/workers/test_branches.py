"""Episodes of several samples count once, whatever the layout and the packing.

pytest tests/workers/test_branches.py"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.workers.role_steps import WORLD_SIZE, run_on_ranks
from tests.workers.run_branches import AGGREGATIONS, LAYOUTS, LOSSES, PACKINGS, branching_rows

LONGEST = 16  # --max-response-length of role_steps.py


def expected_loss(aggregation: str, mini_batch_of: dict[str, int]) -> float:
    """Return the mean loss of the step's updates in float64. All ratios are 1, so the loss is -sum w A, with
    the advantage A and the weight w of each sampled token."""
    rows = branching_rows()
    reward_of = {row["sample"]: row["reward"] for row in rows if row["branch"] == 0}
    group_of = {row["sample"]: row["group"] for row in rows if row["branch"] == 0}
    members: dict[int, list[float]] = {}
    for episode, reward in reward_of.items():
        if reward is not None:
            members.setdefault(group_of[episode], []).append(reward)
    tokens: dict[int, int] = {}
    episode = -1
    for row in rows:
        episode = row["sample"] if row["branch"] == 0 else episode
        tokens[episode] = tokens.get(episode, 0) + len(row["rollout"])
    losses = []
    for index in set(mini_batch_of.values()):
        mine = [e for e in reward_of if mini_batch_of[str(e)] == index and reward_of[e] is not None]
        total, num_tokens = 0.0, sum(tokens[e] for e in mine)
        for e in mine:
            of_group = members[group_of[e]]
            advantage = (reward_of[e] - statistics.mean(of_group)) / (statistics.stdev(of_group) + 1e-4)
            weight = {
                "token-mean": 1 / num_tokens,
                "seq-mean-token-mean": 1 / (len(mine) * tokens[e]),
                "seq-mean-token-sum": 1 / len(mine),
                "dr-grpo": 1 / (len(mine) * LONGEST),
            }[aggregation]
            total -= weight * advantage * tokens[e]
        losses.append(total)
    return statistics.mean(losses)


@pytest.mark.parametrize("layouts", [("dp2", "tp2"), pytest.param(tuple(LAYOUTS), marks=pytest.mark.nightly)])
def test_loss_and_gradient_are_those_of_one_rank_in_every_layout_and_packing(tmp_path, sums_data, layouts):
    """With tensor parallelism both ranks see all samples, as one rank alone would. The tolerance is that of
    fp32 sums in another order."""
    run_on_ranks(Path(__file__).with_name("run_branches.py"), tmp_path, sums_data, *layouts)
    reports = [json.loads((tmp_path / f"report_{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    assert reports[0] == reports[1]
    (report, _), rows = reports, branching_rows()
    assert {row["num_branches"] for row in rows} == {1, 2, 4}
    alone = report["tp2"]
    for layout in layouts:
        found = report[layout]
        mini_batches = found.pop("mini_batches") if layout != "tp2" else found["mini_batches"]
        for aggregation in AGGREGATIONS:
            wanted = expected_loss(aggregation, mini_batches)
            for how in (*(f"{PACKINGS[0]} {loss}" for loss in LOSSES), f"{PACKINGS[1]} ppo"):
                metrics, other = found[f"{how} {aggregation}"], alone[f"{how} {aggregation}"]
                where = f"{layout} {how} {aggregation}"
                assert metrics["policy/loss"] == pytest.approx(wanted, abs=2e-6), where
                assert metrics["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=2e-5), (
                    where
                )
                assert metrics["reward/failed"] == 1.0, where  # an episode, whatever its number of samples
        by_packing = [found[f"{tokens} ppo token-mean"]["policy/grad_norm"] for tokens in PACKINGS]
        assert by_packing[0] == pytest.approx(by_packing[1], rel=2e-5)
        assert found[f"{PACKINGS[0]} ppo token-mean"]["policy/grad_norm"] > 1e-3

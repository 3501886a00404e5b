"""See the cost of each response, a score of its own, as the reward of a critic of costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.algorithms.base import AdvantageInputs, ReferenceInputs
from megarl.algorithms.lagrange import MEAN_COST

if TYPE_CHECKING:
    from torch import Tensor

NO_KL = {"kl_mode": "none", "kl_coef": 0.0, "kl_controller": "fixed", "kl_straight_through": False}
"""Flags of the advantages of costs: costs have no KL taken off them."""
_OF_COST = {"values": "cost_values", "returns": "cost_returns"}


def costs_as_rewards(inputs: AdvantageInputs, score: str) -> AdvantageInputs:
    """Return the inputs of advantages of the costs.

    Args:
        score: name of the score that is the cost.
    Raises: ValueError if a response has no such score."""
    import torch

    assert inputs.scores is not None
    costs = torch.tensor(inputs.scores.required(score, "--cost-score"), dtype=torch.float32)
    return replace(inputs, rewards=costs, values=inputs.cost_values)


def references_of_costs(inputs: ReferenceInputs, sample: int, score: str) -> ReferenceInputs:
    """Return the inputs of the slow reference of advantages of one sample's cost."""
    assert inputs.scores is not None
    episode = inputs.episode(sample)
    cost = inputs.scores.of[score][inputs.positions[episode]]
    columns = lambda one, name: inputs.columns(one, _OF_COST.get(name, name))
    return replace(inputs, rewards={episode: cost}, columns=columns)


def cost_metrics(inputs: AdvantageInputs, costs: Tensor, as_rewards: Mapping[str, float]) -> dict[str, float]:
    """Return this rank's part of the metrics cost/multiplier, cost/mean if a response has a reward, and the critic's
    as cost_critic/*.

    Args:
        costs: [S] fp32, NaN where the reward failed.
        as_rewards: metrics of the advantages of the costs."""
    assert inputs.scores is not None
    here = inputs.counted_rows
    metrics = {f"cost_{name}": part for name, part in as_rewards.items() if name.startswith("critic/")}
    metrics["cost/multiplier"] = inputs.scores.multiplier * len(here) / inputs.num_trained
    if inputs.num_scored:
        metrics[MEAN_COST] = costs[here].double().nansum().item() / inputs.num_scored
    return metrics

"""Online DPO (arXiv:2402.04792): the policy samples several responses to a prompt. The best and the worst of
them by their rewards, for instance those of a judge, are a pair for DPO.

    loss = mean over the prompts of DPO's loss of (best, worst)

A prompt whose valid rewards are all equal is no pair. The other responses are left out of the update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from megarl.algorithms.base import AdvantageInputs, Algorithm, advantage_metrics
from megarl.algorithms.dpo import DPO
from megarl.algorithms.group_advantage import places_in_groups
from megarl.config.errors import FieldRules
from megarl.flow import Flow

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineDPO(DPO):
    """direct preference optimization of the policy's own responses"""

    name: ClassVar[str] = "online-dpo"
    paper: ClassVar[str] = "2402.04792"
    needs_correction: ClassVar[bool] = False
    advantage_formula: ClassVar[str] = "none: dpo's loss of the group's best and worst response by r"
    needs_rollout: ClassVar[bool] = True
    row_needs: ClassVar[Literal["response", "pair", "scored_pair", "labelled"]] = "response"
    relative_to_group: ClassVar[bool] = True

    def field_rules(self) -> FieldRules:
        rule = "is for answers in the data; these are sampled. Leave it out."
        yield not self.precompute_ref_log_probs, "precompute_ref_log_probs", rule

    @property
    def advantage_reads(self) -> tuple[str, ...]:
        return ("rewards", "old_log_probs", "ref_log_probs")

    def flow(self, roles: Iterable[str]) -> Flow:
        return Algorithm.flow(self, roles)

    def pair_rows(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Return the samples with the largest and with the smallest reward of each group where these differ;
        of equal ones the first."""
        sides = []
        for rewards in (inputs.rewards, -inputs.rewards):
            (first,) = (places_in_groups(rewards, inputs.group_ids) == 0).nonzero(as_tuple=True)
            sides.append(first[inputs.group_ids[first].argsort()])
        best, worst = sides
        differs = inputs.rewards[best] > inputs.rewards[worst]  # false for NaN
        return best[differs], worst[differs]

    def left_out(self, inputs: AdvantageInputs) -> Tensor:
        """Return [S] bool: whether a sample is in no pair."""
        import torch

        return ~torch.isin(torch.arange(len(inputs.rewards)), torch.cat(self.pair_rows(inputs)))

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column and the metrics of `Preference`, with those of `advantage_metrics`;
        online_dpo/pairs counts the pairs of the step."""
        columns, metrics = DPO.compute_advantages(self, inputs)
        share = len(inputs.counted_rows) / len(inputs.rewards)
        metrics["online_dpo/pairs"] = len(self.pair_rows(inputs)[0]) * share
        return columns, metrics | advantage_metrics(inputs, columns["advantages"])

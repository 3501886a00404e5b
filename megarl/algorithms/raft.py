"""Reward-ranked fine-tuning (RAFT, arXiv:2304.06767), also called rejection sampling or best-of-n: in every
step the responses of a prompt with the largest rewards are kept, and the policy is fine-tuned on them.

    loss = - sum of log pi over the tokens of kept responses / their number          (--loss-aggregation token-mean)

The other responses are neither in the loss nor in what it is divided by. A step samples with the current
weights, so the paper's stages are steps: its stage of several updates on one set of kept responses is
--global-batch-size or --num-epochs. There is no ratio: a kept response is right whoever sampled it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.group_advantage import places_in_groups
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.algorithms.reference_inputs import rounded_to_fp32
from megarl.algorithms.reference_kl import reference_kl
from megarl.config.errors import Count, FieldRules

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RAFT(PolicyGradient):
    """fine-tuning on the best responses"""

    paper: ClassVar[str] = "2304.06767"
    needs_correction: ClassVar[bool] = False
    advantage_formula: ClassVar[str] = (
        "1 for the responses of a group with the largest r; others are left out"
    )

    policy_loss: str = "reinforce"
    """reinforce: the negative log-prob of the kept responses' tokens, as in supervised fine-tuning."""
    raft_keep: Count = 1
    """Responses of a prompt that are kept, those with the largest rewards; of equal ones the first."""
    raft_min_reward: float | None = None
    """Keep a response only if its reward is at least this. Default: none."""

    def field_rules(self) -> FieldRules:
        yield from PolicyGradient.field_rules(self)
        rule = "is not for raft: a response is kept by its reward alone. Try --kl-mode loss, or leave it out."
        yield self.kl_mode != "reward", "kl_mode", rule

    @property
    def has_ratio(self) -> bool:
        """True: the loss is a likelihood, which needs no ratio to stay right after earlier updates of the
        step."""
        return True

    def left_out(self, inputs: AdvantageInputs) -> Tensor:
        """Return [S] bool, true for the samples of the step that are not kept."""
        rewards = inputs.rewards.double()
        is_kept = (places_in_groups(rewards, inputs.group_ids) < self.raft_keep) & ~rewards.isnan()
        if self.raft_min_reward is not None:
            is_kept &= inputs.rewards >= self.raft_min_reward  # both in fp32
        return ~is_kept

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return advantages of 1 for the tokens of kept responses, and 0 for others, which `left_out` takes
        out of the loss.

        Metrics: raft/kept, the number of kept responses; raft/reward, their mean reward before it was
        shaped; those of `advantage_metrics`, and with a reference kl/per_response and kl/coef.
        """
        _, metrics = reference_kl(self, inputs)
        is_kept = ~self.left_out(inputs)
        here = is_kept[inputs.counted_rows]
        given = inputs.rewards if inputs.given_rewards is None else inputs.given_rewards
        count = max(int(is_kept.sum()), 1)
        metrics |= {
            "raft/kept": float(here.sum()),
            "raft/reward": given[inputs.counted_rows][here].double().sum().item() / count,
        }
        advantages = inputs.spread(is_kept.float())
        return {"advantages": advantages}, metrics | advantage_metrics(inputs, advantages)

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return 1 on each token of a sample that is among the raft_keep best of its group and has at least
        raft_min_reward, else 0."""
        episode = inputs.episode(sample)
        mine, place = inputs.rewards[episode], inputs.positions[episode]
        better = sum(
            inputs.rewards[other] > mine
            or (inputs.rewards[other] == mine and inputs.positions[other] < place)
            for other in inputs.groups[episode]
        )
        is_enough = self.raft_min_reward is None or mine >= rounded_to_fp32(self.raft_min_reward)
        value = float(not math.isnan(mine) and better < self.raft_keep and is_enough)
        num_tokens = len(inputs.columns(sample, "advantages"))
        return {"advantages": ReferenceColumn.constant(num_tokens, value, value)}

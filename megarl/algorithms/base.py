"""What an algorithm is: a frozen dataclass whose fields are its flags, and pure functions of tensors.

An algorithm sees the response tokens of one micro-batch of one rank, flat, N of them, and knows nothing of meshes, engines or
micro-batches. What it returns is already divided by counts of the whole mini-batch, so that adding up over micro-batches and
data-parallel ranks gives the loss, its gradient and the metrics, whatever the split.

This file and the algorithms import torch inside their functions only: the configuration is read in processes without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One packed micro-batch on one rank: N response tokens, whatever their sequences.

    Example: two responses of 3 and 2 tokens here, two more of 4 and 1 elsewhere:
        LossInputs(log_probs=<5 values>, response_lengths=[3, 3, 3, 2, 2], num_tokens=10, num_sequences=4, ...)
    """

    log_probs: Tensor
    """[N] fp32, of the policy now; carries the gradient."""
    response_lengths: Tensor
    """[N] int64, response tokens of the sequence that the token belongs to."""
    num_tokens: int
    """Response tokens of the whole mini-batch: all micro-batches and data-parallel ranks."""
    num_sequences: int
    """Sequences of the whole mini-batch."""
    max_response_length: int
    """The longest response that sampling allows."""
    entropy: Tensor | None = None
    """[N] fp32, of the policy now, with gradient; if `needs_entropy`."""
    old_log_probs: Tensor | None = None
    """[N] fp32, of the policy before the first update on these samples; if `needs_rollout`, as the two below."""
    rollout_log_probs: Tensor | None = None
    """[N] fp32, of the engine that sampled."""
    advantages: Tensor | None = None
    """[N] fp32, `compute_advantages` of the token's sequence."""
    ref_log_probs: Tensor | None = None
    """[N] fp32, of the reference policy; if `needs_reference`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """Base of all algorithms. A new one is a file with a subclass and a line in REGISTRY."""

    needs_critic: ClassVar[bool] = False
    """A critic gives `values` and is trained on `returns`."""
    needs_rollout: ClassVar[bool] = True
    """Responses are sampled and scored. False: they come from the data set."""
    token_level: ClassVar[bool] = True
    """The loss is a sum over tokens, each from its own inputs: `loss` is called for any part of a micro-batch's tokens, and saves a
    quarter of the output layer's work. False: it sees whole sequences, all tokens of a micro-batch at once."""

    @property
    def needs_reference(self) -> bool:
        """A frozen copy of the starting policy gives `ref_log_probs`."""
        return False

    @property
    def needs_entropy(self) -> bool:
        """The loss wants each token's entropy."""
        return False

    def reward_kl(self, old_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor | None:
        """KL estimate [N] of each response token, whose sum per sequence `compute_advantages` wants; None: it wants none."""
        return None

    def compute_advantages(self, rewards: Tensor, group_ids: Tensor, kl: Tensor | None = None) -> Tensor:
        """Advantages [B] fp32 of B sequences that form whole groups.

        Args:
            rewards: [B] fp32; NaN where the reward failed.
            group_ids: [B] int64, equal for the samples of one prompt.
            kl: [B] fp32, `reward_kl` summed over each sequence's response tokens, if it gives any.
        """
        raise NotImplementedError(f"{type(self).__name__} has no advantages (needs_rollout is {self.needs_rollout})")

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the loss, a scalar with gradient, and of the metrics, scalars without.

        Shares are summed over micro-batches and data-parallel ranks, but for metrics ending in `_max`: of those the maximum counts.
        """
        raise NotImplementedError

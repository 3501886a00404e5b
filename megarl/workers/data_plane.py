"""What one rank holds of the current step. Roles in the same process share it; nothing in it passes through the driver."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.batch import Batch
from megarl.packing import MiniBatch


@dataclass
class Rollouts:
    """Samples as the engine made them, before they are packed."""

    rows: list[int]
    """Dataset row of each sample."""
    sample_ids: list[int]
    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: list[list[float]]
    """Of the response tokens, under the distribution they were sampled from."""


@dataclass
class DataPlane:
    rollouts: dict[str, Rollouts] = field(default_factory=dict)
    """By purpose: 'train' and 'eval'."""
    batch: Batch | None = None
    """This rank's share of the step, in the order of its micro-batches."""
    mini_batches: list[MiniBatch] = field(default_factory=list)

    def pack(self, purpose: str) -> Batch | None:
        """What this rank rolled out, with the column rollout_log_probs; None if it rolled out nothing."""
        own = self.rollouts.get(purpose)
        if own is None or not own.sample_ids:
            return None
        return Batch.from_samples(own.sample_ids, own.prompts, own.responses, own.log_probs)

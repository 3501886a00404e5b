"""Define the base class of roles whose model is a policy: a language model that gives log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megarl.batch_invariants import check_column
from megarl.workers.megatron_role import MegatronRole

if TYPE_CHECKING:
    from megarl.workers.store import BatchShard
    from megarl.workers.stored_log_probs import StoredLogProbs
    from megarl.megatron.policy import Policy


class PolicyRole(MegatronRole):
    """One rank's part of a role whose model is a language model that starts from the weights of --model."""

    def build(self) -> Policy:
        from megarl.megatron.policy import Policy

        return self.build_as(Policy)

    def write_stored(self, column: str, stored: StoredLogProbs) -> None:
        """Store log-probs that were computed before as the token column `column`, on the last pipeline
        stage."""
        is_last_stage = self.mesh.coordinates(self.rank)["pp"] == self.mesh.pp - 1
        values = [stored.values(self.shard.batch)] if is_last_stage else None
        self.write_column(column, values, largest=0.0)

    def write_log_probs(self, column: str, canaries: BatchShard | None = None) -> None:
        """Compute the log-probs of this rank's response tokens under the policy, and store them as the token
        column `column`.

        Args:
            canaries: samples that the same pass scores, in micro-batches of their own."""
        micro_batches = self.micro_batches(self.shard.mini_batches)
        extra = [] if canaries is None else self.micro_batches(canaries.mini_batches, canaries)
        log_probs = self.model.log_probs([*micro_batches, *extra], self.config.sampling.temperature)
        if extra and log_probs is not None:
            _set_canaries(column, canaries, log_probs[len(micro_batches) :])
            log_probs = log_probs[: len(micro_batches)]
        self.write_column(column, log_probs, largest=0.0)

    def write_canary_log_probs(self, column: str, canaries: BatchShard) -> None:
        """Compute the log-probs of canaries alone, and store them as their token column `column`."""
        micro_batches = self.micro_batches(canaries.mini_batches, canaries)
        log_probs = self.model.log_probs(micro_batches, self.config.sampling.temperature)
        if log_probs is not None:
            _set_canaries(column, canaries, log_probs)


def _set_canaries(column: str, canaries: BatchShard, log_probs: list[torch.Tensor]) -> None:
    """Store the log-probs of each micro-batch of canaries."""
    canaries.set_column(column, canaries.batch.scatter(torch.cat(log_probs)))
    check_column(canaries.batch, column, 0.0)

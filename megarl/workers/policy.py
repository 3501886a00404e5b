"""Define the base class of roles whose model is a policy: a language model that gives log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.workers.megatron_role import MegatronRole

if TYPE_CHECKING:
    from megarl.megatron.policy import Policy


class PolicyRole(MegatronRole):
    """One rank's part of a role whose model is a language model that starts from the weights of --model."""

    def build(self) -> Policy:
        from megarl.megatron.policy import Policy

        return self.build_as(Policy)

    def write_log_probs(self, column: str) -> None:
        """Compute the log-probs of this rank's response tokens under the policy, and store them as the token
        column `column`."""
        micro_batches = self.micro_batches(self.shard.mini_batches)
        log_probs = self.model.log_probs(micro_batches, self.config.sampling.temperature)
        self.write_column(column, log_probs, largest=0.0)

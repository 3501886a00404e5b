"""Define the base class of roles whose model is a policy: a language model that gives log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.workers.megatron_role import MegatronRole

if TYPE_CHECKING:
    from megarl.megatron.policy import Policy


class PolicyRole(MegatronRole):
    """A policy that starts from --model."""

    def build(self) -> Policy:
        from megarl.megatron.policy import Policy

        return self.build_as(Policy)

    def write_log_probs(self, column: str) -> None:
        """Write the log-probs of the response tokens under this policy as a token column."""
        micro_batches = self.micro_batches(self.shard.mini_batches)
        log_probs = self.model.log_probs(micro_batches, self.config.sampling.temperature)
        self.write_column(column, log_probs, largest=0.0)

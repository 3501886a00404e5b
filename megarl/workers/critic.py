"""Implement the critic on one rank: it predicts a value for every response token, and learns the returns."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from megarl.algorithms.base import ValueLossInputs
from megarl.config.hf_config import ModelShape
from megarl.flow.job_roles import CostCritic, Critic
from megarl.packing import MiniBatch
from megarl.workers.implements import implements
from megarl.workers.loss_probes import value_weight
from megarl.workers.megatron_role import MegatronRole, peak_memory_bytes
from megarl.workers.objective import Objective
from megarl.workers.offload_manager import needs

if TYPE_CHECKING:
    from megarl.megatron.loss_check import LossCheck, PassLimit
    from megarl.megatron.value_model import ValueModel


@implements(Critic)
class CriticRole(MegatronRole):
    """The value model on one rank. It starts from --critic-model; a language model gets a value head of
    zeros.

    The value of a response token is that of the state in which the token was chosen."""

    objective = Objective(
        loss="value_loss",
        inputs=ValueLossInputs,
        columns={"old_values": "values", "returns": "returns"},
        target="returns",
        output="values",
        before="old_values",
        what="value",
        token_weight=value_weight,
    )

    _values, _returns = "values", "returns"
    """Columns that the role writes and learns."""
    folder = property(lambda self: self.config.model.critic_model or self.config.model.model)
    optimizer = property(lambda self: self.config.critic_optimizer)
    adapter_options = property(lambda self: self.config.critic_lora)

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.load(self.folder, value_head=True)

    def build(self) -> ValueModel:
        from megarl.megatron.value_model import ValueModel

        return self.build_as(ValueModel)

    @needs("parameters")
    def values(self) -> None:
        """Write the column values: the critic's prediction at every response token of this rank's samples."""
        self.write_column(self._values, self.model.values(self.micro_batches(self.shard.mini_batches)))

    @needs("parameters", "gradients", "optimizer")
    def update(self) -> dict[str, float]:
        """Make all optimizer updates of the step, and return this rank's part of their mean metrics. Raises
        NonFiniteUpdate as --on-nonfinite says."""
        self.require_columns("update", (self._values, self._returns))
        metrics = self.update_over_epochs(self._update_once)
        return metrics | {"memory/critic_peak_bytes": peak_memory_bytes()} | self.memory_metrics()

    def _update_once(self, mini_batch: MiniBatch, check: LossCheck | None) -> dict[str, float]:
        loss = self.loss_of_update(mini_batch, check)
        return self.model.update(
            self.micro_batches([mini_batch]),
            lambda micro, values: loss(micro, slice(None), values=values),
            check,
        )

    def pass_limit(self) -> PassLimit | None:
        from megarl.workers.pass_limit import value_limit

        return value_limit(self.model.device) if self.has_own(self._values) else None


@implements(CostCritic)
class CostCriticRole(CriticRole):
    """The value model of costs on one rank: a critic with the same flags, and columns of its own."""

    objective = replace(
        CriticRole.objective,
        columns={"old_values": "cost_values", "returns": "cost_returns"},
        target="cost_returns",
    )
    _values, _returns = "cost_values", "cost_returns"

    @needs("parameters", "gradients", "optimizer")
    def update(self) -> dict[str, float]:
        """Make all optimizer updates of the step, and return this rank's part of their mean metrics, as
        cost_critic/*."""
        renamed = {}
        for name, value in super().update().items():
            own = name if "cost_critic" in name else name.replace("critic", "cost_critic", 1)
            renamed[own] = value
        return renamed

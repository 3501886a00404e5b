"""The critic on one rank: a value for every token, and its updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megarl.algorithms.base import ValueLossInputs, promised_weight
from megarl.batch import MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import TrainConfig
from megarl.flow.job_roles import Critic
from megarl.packing import MiniBatch
from megarl.workers.data_plane import DataPlane
from megarl.workers.implements import implements
from megarl.workers.loss_probes import value_weight
from megarl.workers.megatron_role import MegatronRole, peak_memory_bytes, with_target
from megarl.workers.residence import needs

if TYPE_CHECKING:
    from megarl.megatron.loss_check import LossCheck


@implements(Critic)
class CriticRole(MegatronRole):
    """V of the state in which each response token was chosen. Starts from --critic-model; a language model
    gets a value head of zeros."""

    def __init__(
        self,
        name: str,
        config: TrainConfig,
        shape: ModelShape,
        meshes: Mapping[str, MeshSpec],
        plane: DataPlane,
    ) -> None:
        super().__init__(
            name,
            config,
            config.model.critic_model or config.model.model,
            shape,
            meshes,
            plane,
            config.critic_optimizer,
            config.critic_lora,
        )

    def build(self):
        from megarl.megatron.value_model import ValueModel

        config = self.config
        return ValueModel(
            self.shape,
            self.mesh,
            config.model,
            self.parallel,
            self.optimizer,
            config.batch.train_iters,
            config.transformer,
            config.experts,
            self.lora,
        )

    @needs("parameters")
    def values(self) -> None:
        """Write the column values."""
        self.write_column("values", self.model.values(self.micro_batches(self.share.mini_batches)))

    @needs("parameters", "gradients", "optimizer")
    def update(self) -> dict[str, float]:
        """All optimizer updates of the step. Returns and raises as `update_over_epochs`."""
        self.require_columns("update", ("values", "returns"))
        metrics = self.update_over_epochs(self._update_once, target="returns")
        return metrics | {"memory/critic_peak_bytes": peak_memory_bytes()} | self.memory_metrics()

    def loss_check(self, mini_batch: MiniBatch) -> LossCheck:
        from megarl.megatron.loss_check import LossCheck
        from megarl.workers.pass_limit import value_limit

        counts = mini_batch.num_tokens, mini_batch.num_sequences
        limit = value_limit(self.model.device) if self.has_own("values") else None
        longest = self.config.sampling.max_response_length
        promised = promised_weight(self.config.algorithm, "value_loss", *counts, longest)
        return LossCheck(self.name, "value", promised, *counts, limit)

    def _tell(self, check: LossCheck, micro: MicroBatch, rows: torch.Tensor, inputs: ValueLossInputs) -> None:
        """Let the check know what the loss is called with. rows: which of the micro-batch's response
        tokens."""
        if not len(rows):
            return
        weight = None if check.promised is None else value_weight(self.config.algorithm, inputs)
        check.add_tokens(inputs.response_lengths, weight)
        if check.limit is not None:
            check.add_passes(micro, rows, inputs.values, inputs.old_values)

    def _update_once(self, mini_batch: MiniBatch, check: LossCheck | None) -> dict[str, float]:
        def loss(micro: MicroBatch, values: torch.Tensor):
            columns = {
                "old_values": micro.column("values"),
                "returns": micro.column("returns"),
                "response_lengths": micro.response_length_of_token,
            }
            columns = {name: column.to(values.device) for name, column in columns.items()} | {
                "values": values
            }
            if check is not None:
                columns["rows"] = torch.arange(len(values), device=values.device)
            if self.has_failed_samples:
                columns = with_target(columns, columns["returns"])
            of_micro = columns.pop("rows", None)
            inputs = ValueLossInputs(
                num_tokens=mini_batch.num_tokens,
                num_sequences=mini_batch.num_sequences,
                max_response_length=self.config.sampling.max_response_length,
                **columns,
            )
            if check is not None:
                self._tell(check, micro, of_micro, inputs)
            return self.config.algorithm.value_loss(inputs)

        return self.model.update(self.micro_batches([mini_batch]), loss, check)

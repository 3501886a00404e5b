"""The critic on one rank: a value for every token, and its updates."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megarl.algorithms.base import ValueLossInputs
from megarl.batch import MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import TrainConfig
from megarl.packing import MiniBatch
from megarl.workers.data_plane import DataPlane
from megarl.workers.megatron_role import MegatronRole, peak_memory_bytes
from megarl.workers.residence import needs


class CriticRole(MegatronRole):
    """V of the state in which each response token was chosen. Starts from --critic-model; a language model gets a value head of zeros."""

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
        return (
            self.update_over_epochs(self._update_once)
            | {"memory/critic_peak_bytes": peak_memory_bytes()}
            | self.memory_metrics()
        )

    def _update_once(self, mini_batch: MiniBatch) -> dict[str, float]:
        def loss(micro: MicroBatch, values: torch.Tensor):
            old_values, returns = (micro.column(name).to(values.device) for name in ("values", "returns"))
            return self.config.algorithm.value_loss(
                ValueLossInputs(
                    values=values,
                    old_values=old_values,
                    returns=returns,
                    response_lengths=micro.response_length_of_token.to(values.device),
                    num_tokens=mini_batch.num_tokens,
                    num_sequences=mini_batch.num_sequences,
                    max_response_length=self.config.sampling.max_response_length,
                )
            )

        return self.model.update(self.micro_batches([mini_batch]), loss)

"""Define the base class of roles whose model is a policy: a language model that gives log-probs."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import OptimizerConfig, TrainConfig
from megarl.workers.megatron_role import MegatronRole
from megarl.workers.offload_manager import OffloadManager
from megarl.workers.store import SampleStore


class PolicyRole(MegatronRole):
    """A policy that starts from --model."""

    def __init__(
        self,
        name: str,
        config: TrainConfig,
        shape: ModelShape,
        meshes: Mapping[str, MeshSpec],
        store: SampleStore,
        offload_manager: OffloadManager,
        optimizer: OptimizerConfig | None,
    ) -> None:
        lora = config.lora if optimizer else None
        super().__init__(
            name, config, config.model.model, shape, meshes, store, offload_manager, optimizer, lora
        )

    def build(self):
        from megarl.megatron.policy import Policy

        return self.build_as(Policy)

    def write_log_probs(self, column: str) -> None:
        """Write the log-probs of the response tokens under this policy as a token column."""
        micro_batches = self.micro_batches(self.shard.mini_batches)
        log_probs = self.model.log_probs(micro_batches, self.config.sampling.temperature)
        self.write_column(column, log_probs, largest=0.0)

"""List the abilities of each backend of --rollout-backend, for the rules and checks of a configuration.

megarl/rollout/backends.py starts the engines."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import TrainConfig


@dataclass(frozen=True)
class RolloutBackend:
    """The abilities of one backend of --rollout-backend."""

    library: str
    """Name for users."""
    splits_tensors: bool
    """Whether an engine can have several ranks (--rollout-tensor-parallel-size)."""
    limits_head_sizes: bool
    """Whether its attention on a CPU has kernels for some sizes of heads only."""
    has_graphs: bool
    """Whether an engine may run CUDA graphs or compiled code (--rollout-enforce-eager)."""
    has_blocks: bool
    """Whether the KV cache is divided into blocks (--rollout-block-size), not into rows of full length."""
    tells_experts: bool
    """Whether an engine can report the experts that it chose (--moe-routing-replay engine)."""
    takes_arguments: bool
    """Whether other --rollout-<name> flags reach the engine."""

    def is_eager(self, enforced: bool | None, on_cpu: bool) -> bool:
        """Return whether the engine runs without CUDA graphs and compiled code.

        Args:
            enforced: --rollout-enforce-eager."""
        return not self.has_graphs or (on_cpu if enforced is None else enforced)


ROLLOUT_BACKENDS = {
    "vllm": RolloutBackend("vLLM", True, True, True, True, True, True),
    "transformers": RolloutBackend("transformers", False, False, False, False, False, False),
}


def rollout_backend(config: TrainConfig) -> RolloutBackend:
    """Return the backend that samples for this configuration."""
    return ROLLOUT_BACKENDS[config.rollout.backend]

"""Start an inference engine of the backend that --rollout-backend names.

The class of an engine is known only here. Each backend is a module with the two functions of `Backend`. The rules
of the configuration read what a backend can do from megarl/config/rollout_backends.py."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.config.hf_config import ModelShape
from megarl.config.schema import TrainConfig
from megarl.rollout.interface import InferenceEngine
from megarl.rollout.offer import Offer

BACKENDS = {
    "vllm": "megarl.rollout.vllm_engine",
    "transformers": "megarl.rollout.transformers_engine",
}
"""--rollout-backend -> its module, which is imported when an engine starts."""


@dataclass(frozen=True)
class EngineSetup:
    """What a backend needs to start one engine."""

    config: TrainConfig
    shape: ModelShape
    ranks: Sequence[int]
    """Ranks of this engine. This process is one of them, and the first if the engine has its own processes."""
    num_engines: int
    """Number of engines of the role."""


class Backend(Protocol):
    """The functions of a backend's module."""

    def start_in_process(self, setup: EngineSetup, offer: Offer) -> InferenceEngine:
        """Start an engine in this process. Collective over the world.

        Args:
            offer: the trainer's memory, which the engine's weights may use. `offer.taken` is set."""

    def start_process(self, setup: EngineSetup, double_buffer: bool) -> InferenceEngine:
        """Start an engine in processes of its own. Not collective.

        Args:
            double_buffer: whether a version is written beside the one that samples."""


def backend_of(config: TrainConfig) -> Backend:
    """Return the module of the backend that samples for this configuration."""
    return importlib.import_module(BACKENDS[config.rollout.backend])

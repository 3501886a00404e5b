"""Start an inference engine of the backend that --rollout-backend names.

The class of an engine is known only here. The rules of the configuration read what a backend can do from
megarl/config/rollout_backends.py."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.hf_config import ModelShape
from megarl.config.schema import TrainConfig
from megarl.rollout.interface import InferenceEngine
from megarl.rollout.offer import Offer

_BACKENDS = {
    "vllm": ("megarl.rollout.vllm_engine", "megarl.rollout.vllm_processes"),
    "transformers": ("megarl.rollout.transformers_engine", "megarl.rollout.engine_process"),
}
"""--rollout-backend -> the modules that define `start_in_process` and `start_process` for it."""


@dataclass(frozen=True)
class EngineSetup:
    """The inputs with which a backend starts one engine."""

    config: TrainConfig
    shape: ModelShape
    ranks: Sequence[int]
    """Ranks of this engine. This process is one of them, and the first out of process."""
    num_engines: int
    """Number of engines of the role."""


def start_in_process(setup: EngineSetup, offer: Offer) -> InferenceEngine:
    """Start an engine in this process. Collective over the world.

    Args:
        offer: the trainer's memory, which the engine's weights may use. `offer.taken` is set.
    Raises: ValueError for engine arguments that cannot work."""
    module = importlib.import_module(_BACKENDS[setup.config.rollout.backend][0])
    return module.start_in_process(setup, offer)


def start_process(setup: EngineSetup, double_buffer: bool) -> InferenceEngine:
    """Start an engine in processes of its own. Not collective.

    Args:
        double_buffer: whether a version is written beside the one that samples.
    Raises: ValueError for impossible engine arguments; EngineFailed or EngineDied if a process fails."""
    module = importlib.import_module(_BACKENDS[setup.config.rollout.backend][1])
    return module.start_process(setup, double_buffer)

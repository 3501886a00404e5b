"""Find models that Megatron can train and this machine's build of vLLM cannot run."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megarl.checks.machine import Machine
from megarl.config.errors import ConfigError, Errors
from megarl.config.hf_config import ModelShape
from megarl.config.kv_cache import device_errors
from megarl.config.installed import cpu_head_sizes
from megarl.config.reward_models import reward_models
from megarl.config.roles import configs_of_actors
from megarl.config.rollout_backends import rollout_backend
from megarl.config.schema import TrainConfig


_OTHER = {"--model": ", or try --rollout-backend transformers"}


def engine_errors(config: TrainConfig, world_size: int, machine: Machine) -> Errors:
    """Yield an error per model whose head size has no kernel in vLLM's CPU attention, and one if the KV cache
    cannot be released here.

    The configuration must have no other errors."""
    environ = os.environ if machine.is_this else {}
    of_actors = configs_of_actors(config).values()
    yield from dict.fromkeys(
        error for one in of_actors for error in device_errors(one, world_size, machine.has_gpu, environ)
    )
    sizes = None if machine.has_gpu or not config.algorithm.needs_rollout else cpu_head_sizes()
    if sizes is None:
        return
    for flag, folder in dict.fromkeys(_folders(config)):
        try:
            shape = ModelShape.load(folder)
        except ConfigError:
            continue  # a judge that only vLLM knows
        if shape.is_gqa and shape.head_dim not in sizes:
            yield (
                f"{flag} ({folder}): its head_dim is {shape.head_dim}, and vLLM's attention on a CPU has "
                f"kernels for {', '.join(map(str, sizes))} only. "
                f"Use another model, or a GPU{_OTHER.get(flag, '')}."
            )


def _folders(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield (flag, folder) of every model that vLLM runs."""
    for of_actor in configs_of_actors(config).values():
        if rollout_backend(of_actor).limits_head_sizes:
            yield "--model", of_actor.model.model
        yield from (
            ("--reward-model", model.path) for model in reward_models(of_actor) if model.backend == "judge"
        )

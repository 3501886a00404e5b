"""Find models that Megatron can train and vLLM cannot run on this kind of machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

from megarl.checks.machine import Machine
from megarl.config.errors import ConfigError, Errors
from megarl.config.hf_config import ModelShape
from megarl.config.kv_cache import device_errors
from megarl.config.installed import cpu_head_sizes, latent_head_sizes
from megarl.config.reward_models import reward_models
from megarl.config.roles import configs_of_actors
from megarl.config.rollout_backends import rollout_backend
from megarl.config.schema import TrainConfig


_OTHER = {"--model": ", or try --rollout-backend transformers"}


def engine_errors(config: TrainConfig, world_size: int, machine: Machine) -> Errors:
    """Yield an error per model that vLLM's attention has no kernel for here, and one if the KV cache cannot
    be released here.

    The configuration must have no other errors."""
    environ = os.environ if machine.is_this else {}
    of_actors = configs_of_actors(config).values()
    yield from dict.fromkeys(
        error for one in of_actors for error in device_errors(one, world_size, machine.has_gpu, environ)
    )
    if not config.algorithm.needs_rollout:
        return
    if machine.is_this and config.rollout.backend == "vllm":
        folder = tempfile.gettempdir()
        if config.rollout.tensor_parallel_size > 1 and len(os.fsencode(folder)) > 70:
            yield (
                f"TMPDIR ({folder}): has more than 70 characters, which leaves no room for the names of "
                "vLLM's sockets. Try TMPDIR=/tmp."
            )
        if not os.access("/dev/shm", os.W_OK):
            yield (
                "/dev/shm: cannot be written, and vLLM's semaphores lie there. Mount a tmpfs there (docker "
                "run --shm-size 8g), or try --rollout-backend transformers on one rank."
            )
    if machine.has_gpu:
        yield from dict.fromkeys(error for one in of_actors for error in _latents_on_gpu(one))
        return
    if (sizes := cpu_head_sizes()) is None:
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


def _latents_on_gpu(config: TrainConfig) -> Errors:
    """Yield an error per property of multi-head latent attention that vLLM's attention on GPUs lacks kernels
    for.

    Every latent attention backend of vLLM 0.32 on CUDA takes float16 and bfloat16 only
    (`supported_dtypes` in vllm/v1/attention/backends/mla/)."""
    shape = ModelShape.load(config.model.model)
    if not shape.is_mla or not rollout_backend(config).limits_head_sizes:
        return
    head = f"--model ({config.model.model}): it has latent attention, for which vLLM's attention on a GPU has"
    if config.engine_dtype == "float32":
        yield (
            f"{head} no kernels in fp32. Add --bf16, or give --rollout-dtype bfloat16, or try "
            "--rollout-backend transformers."
        )
    heads = (shape.head_dim - shape.qk_rope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim)
    if (sizes := latent_head_sizes()) is not None and heads not in sizes:
        yield (
            f"{head} no kernels with qk_nope_head_dim, qk_rope_head_dim and v_head_dim of {heads}, only of "
            f"{', '.join(map(str, sizes))}. Use another model, or try --rollout-backend transformers."
        )


def _folders(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield (flag, folder) of every model that vLLM runs."""
    for of_actor in configs_of_actors(config).values():
        if rollout_backend(of_actor).limits_head_sizes:
            yield "--model", of_actor.model.model
        yield from (
            ("--reward-model", model.path) for model in reward_models(of_actor) if model.backend == "judge"
        )

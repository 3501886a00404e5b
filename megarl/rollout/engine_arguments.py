"""Choose the vLLM engine arguments of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megarl.config.hf_config import ModelShape
from megarl.config.kv_cache import GPU_MEMORY_UTILIZATION
from megarl.config.mesh import group_timeout
from megarl.config.roles import tells_experts
from megarl.config.schema import TrainConfig
from megarl.rollout.kv_cache import CPU_BLOCK_SIZE, cpu_kv_cache_bytes, most_sequences
from megarl.rollout.names import BACKEND, CPU_NORMS
from megarl.rollout.plugin import check_version

_FIXED = (
    "model",
    "tensor_parallel_size",
    "distributed_executor_backend",
    "logprobs_mode",
    "load_format",
    "weight_transfer_config",
    "skip_tokenizer_init",
    "seed",
    "max_model_len",
    "trust_remote_code",
)


_IN_PROCESS = "external_launcher"
_UNCHECKED_SHARE = 0.01
"""Value of gpu_memory_utilization beside kv_cache_memory_bytes.

The bytes decide, but vLLM refuses to start if this share of the GPU is not free
(vllm/v1/worker/utils.py:761)."""


def engine_arguments(
    config: TrainConfig,
    shape: ModelShape,
    on_cpu: bool,
    num_engines: int = 1,
    executor: str = _IN_PROCESS,
) -> dict[str, object]:
    """Return the vLLM engine arguments of a job.

    A --rollout-<name> of the user wins, except for arguments that training depends on.

    Raises: ValueError naming an engine argument that cannot be chosen."""
    rollout, sampling = config.rollout, config.sampling
    taken = [name for name in _FIXED if name in rollout.engine_args]
    if taken:
        flags = ", ".join(
            f"--rollout-{name.replace('_', '-')} ({rollout.engine_args[name]})" for name in taken
        )
        raise ValueError(f"{flags} cannot be chosen: megarl sets it. Remove the flag.")
    dtype = rollout.dtype if rollout.dtype != "auto" else "bfloat16" if config.model.bf16 else "float32"
    max_model_len = sampling.max_engine_length
    group_timeout_s = int(group_timeout(config.placement.call_timeout_s).total_seconds())
    arguments: dict[str, object] = dict(
        model=config.model.model,
        tokenizer=stop_tokenizer(config),
        skip_tokenizer_init=stop_tokenizer(config) is None,
        dtype=dtype,
        load_format="dummy",
        seed=config.batch.seed,
        tensor_parallel_size=rollout.tensor_parallel_size,
        distributed_executor_backend=executor,
        max_model_len=max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=on_cpu if rollout.enforce_eager is None else rollout.enforce_eager,
        enable_prefix_caching=rollout.enable_prefix_caching,
        block_size=rollout.block_size,
        kv_cache_memory_bytes=rollout.kv_cache_memory_bytes,
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": BACKEND},
        disable_log_stats=True,
        trust_remote_code=False,
        distributed_timeout_seconds=group_timeout_s,
        cpu_distributed_timeout_seconds=group_timeout_s,
    )
    arguments |= (
        _on_cpu(config, shape, num_engines, dtype, max_model_len)
        if on_cpu
        else _on_gpu(config, shape, dtype, releases=executor == _IN_PROCESS)
    )
    return {name: value for name, value in (arguments | rollout.engine_args).items() if value is not None}


def _on_cpu(
    config: TrainConfig, shape: ModelShape, num_engines: int, dtype: str, max_model_len: int
) -> dict[str, object]:
    check_version()
    if tells_experts(config, shape):
        raise ValueError(
            "--moe-routing-replay (engine): vLLM 0.32 tells which experts it chose from its "
            "Model Runner V2 only, which needs "
            "Triton on a GPU, and there is none. Try --moe-routing-replay policy."
        )
    rollout = config.rollout
    arguments: dict[str, object] = {
        "worker_cls": "megarl.rollout.worker.NamedCPUWorker",
        "scheduler_cls": "megarl.rollout.scheduler.DecodeScheduler",
        "ir_op_priority": {"rms_norm": [CPU_NORMS], "fused_add_rms_norm": [CPU_NORMS]},
    }
    if shape.is_mla:
        arguments |= _cpu_latent_arguments(shape)
    if rollout.kv_cache_memory_bytes is None:
        arguments["kv_cache_memory_bytes"] = cpu_kv_cache_bytes(
            shape,
            rollout.tensor_parallel_size,
            4 if dtype == "float32" else 2,
            most_sequences(config, num_engines),
            max_model_len,
            rollout.block_size or CPU_BLOCK_SIZE,
        )
    return arguments


def _on_gpu(config: TrainConfig, shape: ModelShape, dtype: str, releases: bool) -> dict[str, object]:
    """Return the vLLM engine arguments that only an engine on a GPU gets.

    Args:
        releases: whether the engine can release its KV cache."""
    rollout = config.rollout
    default = GPU_MEMORY_UTILIZATION if rollout.kv_cache_memory_bytes is None else _UNCHECKED_SHARE
    return {
        "gpu_memory_utilization": rollout.gpu_memory_utilization or default,
        # vLLM gives a KV cache back only if its pool has allocated it.
        "enable_sleep_mode": True if releases and rollout.release_kv_cache is not False else None,
        "enable_return_routed_experts": True if tells_experts(config, shape) else None,
        # The trainer's logits are fp32. vLLM would round its own to the model's dtype, an error as large
        # as the limit of the log-prob gate in bf16.
        "hf_overrides": {"head_dtype": "float32"} if dtype != "float32" else None,
        # Other backends shuffle the experts, which are then no longer [E, 2F, h].
        "moe_backend": "triton" if shape.is_moe else None,
    }


def _cpu_latent_arguments(shape: ModelShape) -> dict[str, object]:
    """Return the vLLM arguments that latent attention needs on a CPU. Raises ValueError for sizes without a
    kernel.

    vLLM's CPU kernel for rotary embeddings expects contiguous heads. The rotary parts of latent attention's
    queries are not contiguous. Scaled embeddings do not use this kernel. vLLM's AMX kernels free kv_b_proj.
    """
    if (shape.kv_lora_rank, shape.qk_rope_head_dim) != (512, 64):
        raise ValueError(
            f"kv_lora_rank ({shape.kv_lora_rank}) and qk_rope_head_dim ({shape.qk_rope_head_dim}): "
            "vLLM's latent attention on a CPU "
            "has kernels for 512 and 64 only. Sample on a GPU."
        )
    native = (
        {} if shape.rope_scaling else {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
    )
    return {"attention_backend": "CPU_MLA", **native}


def stop_tokenizer(config: TrainConfig) -> str | None:
    """Return the tokenizer with which an engine matches stop strings of --stop and of agents, and makes
    grammars, or None if it needs none. Raises ValueError for a SentencePiece file.

    Transformers must be able to load it."""
    tokenizer = config.model.tokenizer_model or config.model.model
    is_file = Path(tokenizer).is_file()
    if config.sampling.stop and is_file:
        raise ValueError(
            f"--stop {' '.join(config.sampling.stop)} needs a Hugging Face tokenizer, "
            f"--tokenizer-model ({tokenizer}) is a "
            "SentencePiece file. Use --stop-token-ids."
        )
    return tokenizer if config.sampling.stop or config.episodes.has_agent and not is_file else None


def stopping_at(config: TrainConfig, turn_end: int, end_ids: Sequence[int]) -> TrainConfig:
    """Return the configuration with the token that ends a turn among those at which engines stop.

    Args:
        end_ids: the model's own end-of-sequence ids. A base model may not have the chat template's among
            them."""
    if turn_end in end_ids:
        return config
    ids = dict.fromkeys((*config.sampling.stop_token_ids, turn_end))
    return replace(config, sampling=replace(config.sampling, stop_token_ids=(*ids,)))

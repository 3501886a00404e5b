"""Compute the size of an engine's KV cache and its default.

vLLM divides its cache into blocks. The transformers engine has a row of full length for each running
request."""

from __future__ import annotations

from megarl.config.hf_config import ModelShape
from megarl.config.kv_cache import GPU_MEMORY_UTILIZATION
from megarl.config.schema import TrainConfig

CPU_BLOCK_SIZE = 128
"""Number of tokens in a KV-cache block on a CPU, vLLM's default."""
GPU_BLOCK_SIZE = 16
"""Number of tokens in a KV-cache block on a GPU, vLLM's default."""
MAX_CPU_KV_CACHE_BYTES = 2**30
"""Largest default size of an engine's KV cache on a CPU.

Requests wait for each other if the cache is too small for all."""
_SPARE_TOKENS = 128
"""Tokens beyond its end for which a sequence has room in a GPU's cache: a block of vLLM's usual sizes."""


def block_size(config: TrainConfig, on_cpu: bool) -> int:
    """Return the number of tokens in a KV-cache block of vLLM."""
    return config.rollout.block_size or (CPU_BLOCK_SIZE if on_cpu else GPU_BLOCK_SIZE)


def most_sequences(config: TrainConfig, num_engines: int) -> int:
    """Return how many sequences one engine can have at once, at most max_num_seqs.

    Synchronous training samples a step's responses or answers the evaluation rows. With --staleness S the
    engine can have the responses of S + 1 steps, and held-out rows and canaries beside them. With
    --eval-engines fewer engines share each of the two."""
    batch, streaming, limit = config.batch, config.streaming, config.rollout.max_num_seqs
    rows = config.run.eval_num_prompts or limit * num_engines if config.data.eval_data else 0
    held_out = -(-rows * config.run.eval_num_samples // (streaming.eval_engines or num_engines))
    num_prompts = (streaming.staleness + 1) * batch.num_prompts
    group_size = batch.num_samples_per_prompt + config.algorithm.greedy_samples
    trained = -(-num_prompts // max(1, num_engines - streaming.eval_engines)) * group_size
    if streaming.staleness:
        return min(limit, trained + held_out + streaming.num_canaries)
    return min(limit, max(trained, held_out))


def useful_kv_cache_bytes(
    config: TrainConfig, shape: ModelShape, num_engines: int, itemsize: int
) -> int | None:
    """Return the bytes of an engine's KV cache on a GPU that a step's sequences can fill: `most_sequences` of
    full length. None if there is no such limit, because episodes that wait have cached prefixes too.

    Each sequence gets _SPARE_TOKENS more, for the block that vLLM takes ahead of the next token.

    Args:
        itemsize: bytes of an element in the engine's dtype."""
    if config.episodes.has_turns:
        return None
    length, tp = config.sampling.max_engine_length + _SPARE_TOKENS, config.rollout.tensor_parallel_size
    one = sequence_bytes(shape, tp, itemsize, length, block_size(config, on_cpu=False))
    return (most_sequences(config, num_engines) + 1) * one


def cpu_kv_cache_bytes(
    shape: ModelShape, tp_size: int, itemsize: int, num_sequences: int, max_model_len: int, block_size: int
) -> int:
    """Return the bytes of an engine's KV cache on a CPU: for `num_sequences` sequences of full length, but at
    most MAX_CPU_KV_CACHE_BYTES unless two sequences need more."""
    block_bytes, per_sequence = (
        sequence_bytes(shape, tp_size, itemsize, length, block_size) for length in (1, max_model_len)
    )
    return bounded_cache_bytes(block_bytes, per_sequence, num_sequences, at_least=2)


def bounded_cache_bytes(block_bytes: int, per_sequence: int, num_sequences: int, at_least: int) -> int:
    """Return the bytes of a cache for `num_sequences` sequences, at most MAX_CPU_KV_CACHE_BYTES unless
    `at_least` sequences need more."""
    wanted = min(num_sequences * per_sequence, MAX_CPU_KV_CACHE_BYTES)
    return max(at_least * per_sequence, wanted) + block_bytes  # vLLM reserves one block for itself


def num_cache_rows(
    config: TrainConfig, row_bytes: int, num_engines: int, gpu_bytes: int | None, weights: int
) -> int:
    """Return how many requests can run at the same time if the KV cache has a row of full length for each.

    That is enough for `most_sequences`, as far as memory allows: --rollout-kv-cache-memory-bytes, or
    MAX_CPU_KV_CACHE_BYTES on a CPU (but two rows at least), or what --rollout-gpu-memory-utilization leaves.

    Args:
        row_bytes: `sequence_bytes` of the longest sequence.
        gpu_bytes: memory of the GPU; None on a CPU.
        weights: bytes of the engine's weights.
    Returns: 0 if there is no room for one row."""
    rollout = config.rollout
    if rollout.kv_cache_memory_bytes is not None:
        room = rollout.kv_cache_memory_bytes
    elif gpu_bytes is None:
        room = max(MAX_CPU_KV_CACHE_BYTES, 2 * row_bytes)
    else:
        share = rollout.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
        room = max(0, int(share * gpu_bytes) - weights)
    return min(most_sequences(config, num_engines), room // row_bytes)


def sequence_bytes(shape: ModelShape, tp_size: int, itemsize: int, length: int, block_size: int) -> int:
    """Return the bytes of the KV cache of one sequence, in whole blocks, on one engine rank."""
    if shape.is_mla:  # a latent and the rotary part of a key, on every rank
        per_token = shape.num_layers * (shape.kv_lora_rank + shape.qk_rope_head_dim) * itemsize
    else:
        per_token = (
            2 * shape.num_layers * max(1, shape.num_query_groups // tp_size) * shape.head_dim * itemsize
        )
    return per_token * block_size * -(-length // block_size)

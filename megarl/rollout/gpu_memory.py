"""Estimate what a vLLM engine needs on a GPU beside its weights, and size its KV cache by what is left.

vLLM measures its activations and CUDA graphs when it starts, by a forward pass. Here they are estimated, so
that `megarl check` and the ranks use the same numbers. Of the numbers only the count of CUDA graphs has been
compared with a GPU."""

from __future__ import annotations

from megarl.config.hf_config import ModelShape
from megarl.config.schema import TrainConfig
from megarl.reshard.alias import find_aliases
from megarl.reshard.atlas import Atlas, hf_sizes
from megarl.reshard.vllm_atlas import TABLES, vllm_atlas

GRAPH_BYTES = 24 << 20
"""Memory of one captured CUDA graph.

Logs of vLLM's users: 26 MiB a graph (vllm-project/vllm#22897), 19 MiB (#39559, 1.62 GiB for 51 + 35)."""
_LARGE_GPU_BYTES = 70 << 30
_TOKENS_PER_STEP = {True: 16384, False: 8192}
"""Is the GPU large -> vLLM's default of --rollout-max-num-batched-tokens (vllm/engine/arg_utils.py:2923)."""
_LOGITS_COPIES = 3
"""Copies of the logits in fp32 while tokens are sampled: logits, processed logits and log-probs."""


def engine_activation_bytes(
    config: TrainConfig, shape: ModelShape, itemsize: int, gpu_bytes: int | None
) -> int:
    """Return the bytes of activations that an engine needs at once on each of its ranks.

    Layers run one after another and keep nothing, so one layer or the logits of one step decide.

    Args:
        itemsize: bytes of an element in the engine's dtype.
        gpu_bytes: memory of the GPU, None if not known."""
    rollout, tp = config.rollout, config.rollout.tensor_parallel_size
    default = _TOKENS_PER_STEP[(gpu_bytes or 0) >= _LARGE_GPU_BYTES]
    tokens = rollout.max_num_batched_tokens or max(default, rollout.max_num_seqs)
    widths = [3 * shape.ffn_hidden_size / tp]  # gate and up, and their product
    if shape.is_moe:
        widths.append(shape.moe_router_topk * (shape.hidden_size + 3 * shape.moe_ffn_hidden_size / tp))
    queries = shape.num_attention_heads * shape.head_dim / tp
    keys = max(1, shape.num_query_groups / tp) * shape.head_dim
    widths.append(2 * queries + 2 * keys)  # the output of attention has the size of the queries
    layer = tokens * (2 * shape.hidden_size + max(widths)) * itemsize
    logits = _LOGITS_COPIES * rollout.max_num_seqs * shape.vocab_size * 4
    return int(max(layer, logits))


def cuda_graph_bytes(config: TrainConfig) -> int:
    """Return the bytes of an engine's CUDA graphs on each of its ranks; 0 with --rollout-enforce-eager.

    vLLM captures batches of 1, 2, 4, then every 8 tokens to 256 and every 16 to twice max_num_seqs, at most
    512 (vllm/config/vllm.py:2304), and those up to max_num_seqs again for decoding."""
    if config.rollout.enforce_eager:
        return 0
    largest = min(2 * config.rollout.max_num_seqs, 512)
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= largest]
    decoding = [size for size in sizes if size <= config.rollout.max_num_seqs]
    return (len(sizes) + len(decoding)) * GRAPH_BYTES


def own_weight_elements(shape: ModelShape, tp_size: int, tp_rank: int, offered: Atlas) -> int:
    """Return the number of elements of an engine rank's weights that do not share the trainer's memory.

    Args:
        offered: sharding spec of the weights that the trainer of this rank shares; {} for none."""
    if shape.model_type not in TABLES:
        return sum(rows * cols for rows, cols in hf_sizes(shape).values()) // tp_size
    atlas = vllm_atlas(shape, tp_size, tp_rank)
    shared = find_aliases(offered, atlas) if offered else {}
    return sum(param.rows * param.cols for name, param in atlas.items() if name not in shared)


def gpu_kv_cache_bytes(config: TrainConfig, free: int, fraction: float, useful: int | None) -> int:
    """Return the bytes of a KV cache that takes a share of the free bytes; 0 if nothing is free.

    More than a step's sequences can fill is taken only if --rollout-free-gpu-memory-fraction asks for the
    share, because all of it is mapped and unmapped in every step.

    Args:
        useful: `useful_kv_cache_bytes`."""
    share = max(0, int(fraction * free))
    if useful is None or config.rollout.free_gpu_memory_fraction is not None:
        return share
    return min(share, useful)

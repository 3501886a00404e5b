"""Estimate the bytes of activations that a Megatron role holds on a rank while it computes.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4) count what a layer keeps for its backward pass by the
tensors that each operation saves. For b sequences of s tokens, hidden size h, a heads and two bytes an
element they find s b h (10 + 24 / t + 5 a s / (h t)) with tensor parallelism t. With sequence parallelism and
without the scores of attention they find s b h 34 / t. A recomputed layer keeps 2 s b h.

This module makes the same count for what megarl runs, with T packed tokens in place of s b. There are no
dropout masks. Attention keeps no scores. There are fewer key than query heads, and the gated MLP has any
width. Norms and rotary embeddings are counted as they are computed here. `LAYER` lists the tensors. The
output layer keeps one buffer of logits, because its gradients are computed chunk by chunk
(kernels/linear_head.py). Temporary tensors of an operation are not counted, except for the layers that a
backward pass recomputes."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, parallel_of
from megarl.config.schema import ParallelConfig, TrainConfig
from megarl.reshard.atlas import dimensions, has


@dataclass(frozen=True, slots=True)
class Saved:
    """Tensors of one size that a layer keeps for its backward pass, per token.

    Args:
        size: size of one tensor, by the names of `_sizes`.
        count: number of tensors.
        split: what divides them: tp, sp (tp with sequence parallelism only), or nothing. gathered: as sp, and
            the ranks that split an expert hold the tokens of all of them.
        module: the entry of --recompute-modules that leaves them out.
        needs: the flag of the layer's ModelShape that must be set, or there are no such tensors.
        per_expert: one for each expert that a token goes to.
        only: "cpu": only PyTorch's own norm and attention keep them, Transformer Engine's do not. "cpu bf16":
            the same with bf16 only.
        itemsize: bytes of an element. None: that of the model's dtype."""

    size: str
    count: int
    split: str = ""
    module: str | None = None
    needs: str | None = None
    per_expert: bool = False
    only: str | None = None
    itemsize: int | None = None


def _norm(
    size: str, needs: str | None = None, module: str | None = None, count: int = 1
) -> tuple[Saved, ...]:
    """Return what norms keep beside their inputs and outputs on a CPU: the normalized numbers, in fp32."""
    return (
        Saved(size, count, "sp", module, needs, only="cpu"),
        Saved(size, count, "sp", module, needs, only="cpu bf16", itemsize=4),
    )


LAYER = (
    Saved("hidden", 2, "sp"),  # inputs of the two norms
    *_norm("hidden", module="layernorm", count=2),
    # outputs of the norms, which are inputs of the next product
    Saved("hidden", 2, "sp", module="layernorm"),
    Saved("attention", 1, "tp"),  # attention's output, which is the input of linear_proj
    # grouped-query attention
    Saved("query", 1, "tp", needs="is_gqa"),  # linear_qkv's output
    Saved("key", 2, "tp", needs="is_gqa"),
    Saved("query", 1, "tp", needs="is_gqa"),  # queries and keys with rotary embeddings
    Saved("key", 1, "tp", needs="is_gqa"),
    Saved("query", 2, "tp", needs="qk_layernorm"),  # queries and keys around their norms
    Saved("key", 1, "tp", needs="qk_layernorm"),
    Saved("query", 1, "tp", needs="qk_layernorm", only="cpu bf16", itemsize=4),
    Saved("key", 1, "tp", needs="qk_layernorm", only="cpu bf16", itemsize=4),
    Saved("head", 4, needs="is_gqa"),  # cosines and sines
    Saved("attention", 1, "tp", "core_attn", "is_gqa", only="cpu"),  # the output again, of each sequence
    # multi-head latent attention: latents around their norms, then queries, keys and values of all heads
    Saved("query_latent", 2, "sp", needs="has_query_latent"),
    *_norm("query_latent", "has_query_latent"),
    Saved("latent_and_rope", 1, "sp", needs="is_mla"),
    Saved("latent", 1, "sp", needs="is_mla"),
    *_norm("latent", "is_mla"),
    Saved("rope", 4, needs="is_mla"),  # cosines and sines
    Saved("query", 2, "tp", needs="is_mla"),
    Saved("attention", 1, "tp", needs="is_mla"),
    Saved("query", 1, "tp", "core_attn", "is_mla", only="cpu bf16", itemsize=4),  # in fp32
    # PyTorch's attention on a CPU keeps scores if heads of values have another size than those of queries
    Saved("scores", 1, "tp", "core_attn", "is_mla", only="cpu", itemsize=4),
    # a dense layer: gate, up, the activated gate, their product
    Saved("ffn", 5, "tp", module="mlp", needs="is_dense"),
    # a mixture of experts. Shared experts: as a dense layer, and the output before their gate
    Saved("shared_ffn", 5, "tp", needs="is_moe"),
    Saved("hidden", 1, "sp", needs="gates_shared_expert"),
    Saved("hidden", 1, "gathered", needs="is_moe", per_expert=True),  # permuted tokens, inputs of experts
    # gate and up, the activated gate, up again, their product, the same times the token's weight
    Saved("expert_ffn", 6, "sp", needs="is_moe", per_expert=True),
    # router: scores, weights (twice) and choices of all experts
    Saved("experts", 3, "sp", needs="is_moe", itemsize=4),
    Saved("experts", 1, "sp", needs="is_moe", itemsize=1),
    Saved("experts", 1, "sp", needs="moe_router_num_groups", itemsize=4),  # scores by group
    # the chosen experts (twice) and the permutation as int64, their scores and weights in fp32
    Saved("one", 3, "sp", needs="is_moe", per_expert=True, itemsize=8),
    Saved("one", 2, "sp", needs="is_moe", per_expert=True, itemsize=4),
)
"""Tensors of a layer on one rank, as `saved_tensors_hooks` count them (tests/checks/test_activations.py).

--recompute-modules mlp leaves out nothing of a mixture of experts, as Megatron's layer ignores it there."""

_LOGIT_ELEMENTS_CPU, _MIN_ROWS_CPU = 2**23, 256
_LOGIT_BYTES_CUDA, _MIN_ROWS_CUDA, _MAX_ROWS_CUDA = 5 * 2**29, 1024, 8192
"""Copies of the numbers in kernels/linear_head.py, which imports torch. A test compares them."""


def role_activations(
    config: TrainConfig, role: str, shape: ModelShape, mesh: MeshSpec, on_cpu: bool
) -> tuple[int, int]:
    """Return (bytes during log-probs or values, bytes during an update) on the rank that needs most.

    The micro-batch is full."""
    parallel, bf16 = parallel_of(config, role), config.model.bf16
    rank_tokens = micro_batch_tokens(config, mesh) // mesh.cp
    longest = config.sampling.max_length
    layers = [
        layer_bytes(shape.of_layer(layer), parallel, mesh, bf16, on_cpu, longest)
        for layer in range(shape.num_layers)
    ]
    of_head = head_bytes(shape, mesh, rank_tokens, bf16, on_cpu)
    stage = -(-len(layers) // mesh.pp)
    kept = max(
        rank_tokens * stage_bytes(layers[start : start + stage], shape, parallel, mesh, bf16)
        for start in range(0, len(layers), stage)
    )
    # 1F1B: the first stage has as many micro-batches in flight as there are stages. Each interleaved stage
    # has a part of one more.
    in_flight = mesh.pp * (1 + (mesh.pp - 1) / (mesh.pp * mesh.vpp) if mesh.vpp > 1 else 1)
    return rank_tokens * max(layers) + of_head, int(kept * in_flight) + rank_tokens * _recomputed(
        layers, parallel
    ) + of_head


def micro_batch_tokens(config: TrainConfig, mesh: MeshSpec) -> int:
    """Return the number of tokens of the largest micro-batch.

    It is --max-tokens-per-micro-batch, less if a mini-batch has fewer tokens, and more if one sequence is
    longer."""
    longest, batch = config.sampling.max_length, config.batch
    return max(
        longest, min(batch.max_tokens_per_micro_batch, -(-batch.global_batch_size // mesh.dp) * longest)
    )


def layer_bytes(
    kind: ModelShape, parallel: ParallelConfig, mesh: MeshSpec, bf16: bool, on_cpu: bool, longest: int
) -> int:
    """Return the bytes that one layer keeps per token of this rank, without full recomputation.

    Experts are taken to get equally many tokens. `longest` is the length of a sequence, for the attention
    that keeps scores."""
    sizes, total = _sizes(kind, longest), 0.0
    recomputed = (
        parallel.recompute_modules or ("core_attn",) if parallel.recompute_granularity == "selective" else ()
    )
    of_sequence = mesh.tp if parallel.sequence_parallel else 1
    ways = {"": 1, "tp": mesh.tp, "sp": of_sequence, "gathered": of_sequence / mesh.expert_tp}
    for saved in LAYER:
        wanted = saved.only is None or on_cpu and (bf16 or saved.only == "cpu")
        if wanted and has(kind, saved.needs) and saved.module not in recomputed:
            copies = saved.count * (kind.moe_router_topk if saved.per_expert else 1)
            itemsize = saved.itemsize or (2 if bf16 else 4)
            total += copies * sizes[saved.size] * itemsize / ways[saved.split]
    return int(total)


def _sizes(kind: ModelShape, longest: int) -> dict[str, int]:
    """Return name -> elements per token of the sizes that the rows of `LAYER` name."""
    scores = kind.num_attention_heads * longest
    return dimensions(kind) | {"rope": kind.qk_rope_head_dim, "scores": scores}


def head_bytes(shape: ModelShape, mesh: MeshSpec, tokens: int, bf16: bool, on_cpu: bool) -> int:
    """Return the bytes that are held after the last layer: its norm, hidden states with their gradient, and a
    buffer of logits.

    A value head has no logits."""
    itemsize, columns = 2 if bf16 else 4, shape.padded_vocab_size() // mesh.tp
    logits = (
        0
        if shape.value_head
        else min(tokens, logit_rows(columns, on_cpu)) * columns * (4 if on_cpu or not bf16 else 6)
    )
    return 4 * tokens * shape.hidden_size * itemsize + logits


def logit_rows(num_columns: int, on_cpu: bool) -> int:
    """Return the number of tokens whose logits the output layer holds at once, in its buffer."""
    if on_cpu:
        return max(_LOGIT_ELEMENTS_CPU // num_columns, _MIN_ROWS_CPU)
    return min(max(_LOGIT_BYTES_CUDA // (4 * num_columns) // 128 * 128, _MIN_ROWS_CUDA), _MAX_ROWS_CUDA)


def stage_bytes(
    layers: list[int], shape: ModelShape, parallel: ParallelConfig, mesh: MeshSpec, bf16: bool
) -> int:
    """Return the bytes per token that the layers of one stage keep between forward and backward pass.

    A recomputed layer keeps its input."""
    if parallel.recompute_granularity != "full":
        return sum(layers)
    of_input = shape.hidden_size * (2 if bf16 else 4) // (mesh.tp if parallel.sequence_parallel else 1)
    number = min(parallel.recompute_num_layers or 1, len(layers))
    if parallel.recompute_method == "block":  # the first layers are recomputed, one by one
        return number * of_input + sum(layers[number:])
    return -(-len(layers) // number) * of_input


def _recomputed(layers: list[int], parallel: ParallelConfig) -> int:
    """Return the bytes per token of the layers that the backward pass recomputes together."""
    if parallel.recompute_granularity != "full":
        return 0
    return max(layers) * (
        1 if parallel.recompute_method == "block" else min(parallel.recompute_num_layers or 1, len(layers))
    )

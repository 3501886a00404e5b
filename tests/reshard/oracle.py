"""Gather-then-split in numpy: what every rank of Megatron and of vLLM holds, written down without looking at
megarl.reshard.

A model is a dict of full arrays in which every element of the whole model has a value of its own, so nothing
that lands in a wrong place can look right. Layouts: Megatron-Core 0.19.2 and vLLM 0.32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from megarl.config.hf_config import ModelShape

Arrays = dict[str, ndarray]


def full_model(shape: ModelShape) -> Arrays:
    """Checkpoint name -> [rows, cols] (vectors [n, 1]) int64; all elements of the model are numbered through
    from 0."""
    h, d, v = shape.hidden_size, shape.head_dim, shape.vocab_size
    q, k = shape.num_attention_heads * d, shape.num_query_groups * d
    sizes = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h, 1)}
    if not shape.tie_word_embeddings:
        sizes["lm_head.weight"] = (v, h)
    for i in range(shape.num_layers):
        layer = {
            "input_layernorm.weight": (h, 1),
            "post_attention_layernorm.weight": (h, 1),
            "self_attn.o_proj.weight": (h, q),
        }
        for name, rows in (("q", q), ("k", k), ("v", k)):
            layer[f"self_attn.{name}_proj.weight"] = (rows, h)
            if shape.model_type == "qwen2":
                layer[f"self_attn.{name}_proj.bias"] = (rows, 1)
        if shape.model_type in ("qwen3", "qwen3_moe"):
            layer |= {"self_attn.q_norm.weight": (d, 1), "self_attn.k_norm.weight": (d, 1)}
        if shape.model_type == "qwen3_moe":
            layer["mlp.gate.weight"] = (shape.num_moe_experts, h)
        mlps = [(f"mlp.experts.{e}.", shape.moe_ffn_hidden_size) for e in range(shape.num_moe_experts)] or [
            ("mlp.", shape.ffn_hidden_size)
        ]
        for mlp, f in mlps:
            layer |= {
                f"{mlp}gate_proj.weight": (f, h),
                f"{mlp}up_proj.weight": (f, h),
                f"{mlp}down_proj.weight": (h, f),
            }
        sizes |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    model, at = {}, 0
    for name, (rows, cols) in sizes.items():
        model[name] = np.arange(at, at + rows * cols).reshape(rows, cols)
        at += rows * cols
    return model


def stack_qkv(shape: ModelShape, shard: Arrays, tp: int) -> Arrays:
    """The shard with linear_qkv's rows in the order [query heads; keys; values], for whole groups on each
    rank."""
    heads, groups, stacked = shape.num_attention_heads // tp, shape.num_query_groups // tp, dict(shard)
    for name, array in shard.items():
        if "linear_qkv.weight" in name or "linear_qkv.bias" in name:
            by_group = array.reshape(groups, heads // groups + 2, shape.head_dim, -1)
            parts = (by_group[:, :-2], by_group[:, -2], by_group[:, -1])
            stacked[name] = np.concatenate([part.reshape(-1, array.shape[1]) for part in parts])
    return stacked


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a Megatron model. Rank order: tp, dp, pp; for experts etp, ep, edp, pp; fastest
    first."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.dp * self.pp


def padded(embedding: ndarray) -> ndarray:
    """Rows up to a multiple of 64, filled with -1."""
    return np.concatenate([embedding, np.full((-len(embedding) % 64, embedding.shape[1]), -1)])


def rows(array: ndarray, parts: int, index: int) -> ndarray:
    size, rest = divmod(len(array), parts)
    assert rest == 0
    return array[index * size : (index + 1) * size]


def columns(array: ndarray, parts: int, index: int) -> ndarray:
    return rows(array.T, parts, index).T


def megatron_shard(shape: ModelShape, model: Arrays, layout: Layout, index: int, te: bool) -> Arrays:
    """What the rank at `index` of the mesh holds."""
    tp, stage = index % layout.tp, index // (layout.tp * layout.dp)
    etp, ep = index % layout.etp, index // layout.etp % layout.ep
    shard: Arrays = {}
    per_chunk = shape.num_layers // (layout.pp * layout.vpp)
    for chunk in range(layout.vpp):
        prefix = f"chunks.{chunk}." if layout.vpp > 1 else ""
        first, last = chunk == stage == 0, (chunk, stage) == (layout.vpp - 1, layout.pp - 1)
        if first:
            shard[prefix + "embedding.word_embeddings.weight"] = rows(
                padded(model["model.embed_tokens.weight"]), layout.tp, tp
            )
        for local in range(per_chunk):
            hf, here = (
                f"model.layers.{(chunk * layout.pp + stage) * per_chunk + local}.",
                f"{prefix}decoder.layers.{local}.",
            )
            for kind in ("weight", "bias"):
                if f"{hf}self_attn.q_proj.{kind}" in model:
                    parts = [model[f"{hf}self_attn.{n}_proj.{kind}"] for n in "qkv"]
                    by_group = [part.reshape(shape.num_query_groups, -1, part.shape[1]) for part in parts]
                    grouped = np.concatenate(by_group, axis=1).reshape(-1, parts[0].shape[1])
                    shard[f"{here}self_attention.linear_qkv.{kind}"] = rows(grouped, layout.tp, tp)
            for n in "qk":
                if f"{hf}self_attn.{n}_norm.weight" in model:
                    shard[f"{here}self_attention.{n}_layernorm.weight"] = model[
                        f"{hf}self_attn.{n}_norm.weight"
                    ]
            shard[here + "self_attention.linear_proj.weight"] = columns(
                model[hf + "self_attn.o_proj.weight"], layout.tp, tp
            )
            norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
            shard[here + norm] = model[hf + "input_layernorm.weight"]
            norm = (
                "mlp.linear_fc1.layer_norm_weight"
                if te and not shape.num_moe_experts
                else "pre_mlp_layernorm.weight"
            )
            shard[here + norm] = model[hf + "post_attention_layernorm.weight"]
            if shape.num_moe_experts:
                shard[here + "mlp.router.weight"] = model[hf + "mlp.gate.weight"]
                mine = np.split(np.arange(shape.num_moe_experts), layout.ep)[ep]
                for j, e in enumerate(mine):
                    name = (
                        f"{here}mlp.experts.%s.weight{j}"
                        if te
                        else f"{here}mlp.experts.local_experts.{j}.%s.weight"
                    )
                    shard[name % "linear_fc1"], shard[name % "linear_fc2"] = mlp_shard(
                        model, f"{hf}mlp.experts.{e}.", layout.etp, etp
                    )
            else:
                fc1, fc2 = mlp_shard(model, hf + "mlp.", layout.tp, tp)
                shard |= {here + "mlp.linear_fc1.weight": fc1, here + "mlp.linear_fc2.weight": fc2}
        if last:
            shard[prefix + "decoder.final_layernorm.weight"] = model["model.norm.weight"]
            if not (shape.tie_word_embeddings and layout.pp == 1):
                output = model["model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"]
                shard[prefix + "output_layer.weight"] = rows(padded(output), layout.tp, tp)
    return shard


def mlp_shard(model: Arrays, mlp: str, parts: int, index: int) -> tuple[ndarray, ndarray]:
    """(gate above up, down) of one rank."""
    gate_up = [rows(model[f"{mlp}{n}_proj.weight"], parts, index) for n in ("gate", "up")]
    return np.concatenate(gate_up), columns(model[f"{mlp}down_proj.weight"], parts, index)


def gather(shape: ModelShape, layout: Layout, shards: list[Arrays], te: bool) -> Arrays:
    """The full model out of the shards of all ranks of a mesh: the way back, by concatenating what the ranks
    of a group hold."""
    model: Arrays = {}
    width, per_chunk = layout.tp * layout.dp, shape.num_layers // (layout.pp * layout.vpp)
    ratio, d, vocab = shape.num_attention_heads // shape.num_query_groups, shape.head_dim, shape.vocab_size

    def everyone(stage: int, name: str) -> list[ndarray]:
        return [shards[stage * width + tp][name] for tp in range(layout.tp)]

    def mlp(hf: str, parts: list[tuple[ndarray, ndarray]]) -> None:
        halves = [np.split(fc1, 2) for fc1, _ in parts]
        model[hf + "gate_proj.weight"], model[hf + "up_proj.weight"] = (
            np.concatenate([half[i] for half in halves]) for i in (0, 1)
        )
        model[hf + "down_proj.weight"] = np.concatenate([fc2 for _, fc2 in parts], axis=1)

    for layer in range(shape.num_layers):
        position, local = divmod(layer, per_chunk)
        chunk, stage = divmod(position, layout.pp)
        here, hf = (
            f"{f'chunks.{chunk}.' if layout.vpp > 1 else ''}decoder.layers.{local}.",
            f"model.layers.{layer}.",
        )
        one = shards[stage * width]
        for kind in ("weight", "bias"):
            if f"{here}self_attention.linear_qkv.{kind}" in one:
                grouped = np.concatenate(everyone(stage, f"{here}self_attention.linear_qkv.{kind}"))
                heads = grouped.reshape(shape.num_query_groups, ratio + 2, d, -1)
                for n, part in (("q", heads[:, :ratio]), ("k", heads[:, ratio]), ("v", heads[:, ratio + 1])):
                    model[f"{hf}self_attn.{n}_proj.{kind}"] = part.reshape(-1, grouped.shape[1])
        for n in "qk":
            if f"{here}self_attention.{n}_layernorm.weight" in one:
                model[f"{hf}self_attn.{n}_norm.weight"] = one[f"{here}self_attention.{n}_layernorm.weight"]
        model[hf + "self_attn.o_proj.weight"] = np.concatenate(
            everyone(stage, here + "self_attention.linear_proj.weight"), axis=1
        )
        norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
        model[hf + "input_layernorm.weight"] = one[here + norm]
        norm = (
            "mlp.linear_fc1.layer_norm_weight"
            if te and not shape.num_moe_experts
            else "pre_mlp_layernorm.weight"
        )
        model[hf + "post_attention_layernorm.weight"] = one[here + norm]
        if shape.num_moe_experts:
            model[hf + "mlp.gate.weight"] = one[here + "mlp.router.weight"]
            held = shape.num_moe_experts // layout.ep
            for e in range(shape.num_moe_experts):
                ep, j = divmod(e, held)
                name = (
                    f"{here}mlp.experts.%s.weight{j}"
                    if te
                    else f"{here}mlp.experts.local_experts.{j}.%s.weight"
                )
                holders = [shards[stage * width + ep * layout.etp + etp] for etp in range(layout.etp)]
                mlp(
                    f"{hf}mlp.experts.{e}.",
                    [(s[name % "linear_fc1"], s[name % "linear_fc2"]) for s in holders],
                )
        else:
            mlp(
                hf + "mlp.",
                list(
                    zip(
                        everyone(stage, here + "mlp.linear_fc1.weight"),
                        everyone(stage, here + "mlp.linear_fc2.weight"),
                    )
                ),
            )
    head, tail = ("chunks.0.", f"chunks.{layout.vpp - 1}.") if layout.vpp > 1 else ("", "")
    model["model.embed_tokens.weight"] = np.concatenate(
        everyone(0, head + "embedding.word_embeddings.weight")
    )[:vocab]
    model["model.norm.weight"] = shards[(layout.pp - 1) * width][tail + "decoder.final_layernorm.weight"]
    if not shape.tie_word_embeddings:
        model["lm_head.weight"] = np.concatenate(everyone(layout.pp - 1, tail + "output_layer.weight"))[
            :vocab
        ]
    return model


def vllm_shard(shape: ModelShape, model: Arrays, tp: int, r: int) -> Arrays:
    """What rank `r` of a vLLM engine holds. Rows that only pad the vocabulary are -1."""
    groups = shape.num_query_groups
    kv_heads = (
        np.arange(groups)[r * groups // tp : (r + 1) * groups // tp]
        if groups >= tp
        else np.array([r // (tp // groups)])
    )
    shard = {"model.norm.weight": model["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in model:
            shard[name] = rows(padded(model[name]), tp, r)
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}."
        for kind in ("weight", "bias"):
            if f"{layer}self_attn.q_proj.{kind}" in model:
                q, k, v = (model[f"{layer}self_attn.{n}_proj.{kind}"] for n in "qkv")
                k, v = (
                    part.reshape(groups, -1, part.shape[1])[kv_heads].reshape(-1, part.shape[1])
                    for part in (k, v)
                )
                shard[f"{layer}self_attn.qkv_proj.{kind}"] = np.concatenate([rows(q, tp, r), k, v])
        shard[layer + "self_attn.o_proj.weight"] = columns(model[layer + "self_attn.o_proj.weight"], tp, r)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mlp.gate",
        ):
            if f"{layer}{name}.weight" in model:
                shard[f"{layer}{name}.weight"] = model[f"{layer}{name}.weight"]
        if shape.num_moe_experts:
            parts = [
                mlp_shard(model, f"{layer}mlp.experts.{e}.", tp, r) for e in range(shape.num_moe_experts)
            ]
            shard[layer + "mlp.experts.routed_experts.w13_weight"] = np.concatenate([w13 for w13, _ in parts])
            shard[layer + "mlp.experts.routed_experts.w2_weight"] = np.concatenate([w2 for _, w2 in parts])
        else:
            shard[layer + "mlp.gate_up_proj.weight"], shard[layer + "mlp.down_proj.weight"] = mlp_shard(
                model, layer + "mlp.", tp, r
            )
    return shard

"""Full random models, and each side's shards cut by hand with torch operations: the reference for atlases and
plans.

Nothing here looks at megarl.reshard: what a shard holds is written down a second time, from the layouts of
Megatron-Core 0.19 and vLLM 0.32."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.config.hf_config import ModelShape


def make_shape(
    model_type: str,
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    groups: int = 2,
    head_dim: int = 8,
    ffn: int = 48,
    vocab: int = 61,
    tied: bool = False,
    experts: int = 4,
) -> ModelShape:
    return ModelShape(
        model_type=model_type,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        qkv_bias=model_type == "qwen2",
        qk_layernorm=model_type in ("qwen3", "qwen3_moe"),
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=512,
        eos_token_ids=(1,),
        torch_dtype="float32",
        **(
            dict(num_moe_experts=experts, moe_ffn_hidden_size=ffn, moe_router_topk=2)
            if model_type == "qwen3_moe"
            else {}
        ),
    )


def hf_model(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """Random full state dict; vectors are 1-D, as in a checkpoint."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    h, q, k, f = (
        shape.hidden_size,
        shape.num_attention_heads * shape.head_dim,
        shape.num_query_groups * shape.head_dim,
        shape.ffn_hidden_size,
    )
    model = {"model.embed_tokens.weight": draw(shape.vocab_size, h), "model.norm.weight": draw(h)}
    for i in range(shape.num_layers):
        p = f"model.layers.{i}."
        for name, rows in (("q", q), ("k", k), ("v", k)):
            model[f"{p}self_attn.{name}_proj.weight"] = draw(rows, h)
            if shape.model_type == "qwen2":
                model[f"{p}self_attn.{name}_proj.bias"] = draw(rows)
        if shape.model_type == "qwen3":
            model[f"{p}self_attn.q_norm.weight"], model[f"{p}self_attn.k_norm.weight"] = (
                draw(shape.head_dim),
                draw(shape.head_dim),
            )
        model |= {
            f"{p}self_attn.o_proj.weight": draw(h, q),
            f"{p}mlp.gate_proj.weight": draw(f, h),
            f"{p}mlp.up_proj.weight": draw(f, h),
            f"{p}mlp.down_proj.weight": draw(h, f),
            f"{p}input_layernorm.weight": draw(h),
            f"{p}post_attention_layernorm.weight": draw(h),
        }
    if not shape.tie_word_embeddings:
        model["lm_head.weight"] = draw(shape.vocab_size, h)
    return model


def matrix(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _pad_vocab(embedding: Tensor) -> Tensor:
    return torch.cat([embedding, embedding.new_zeros(-len(embedding) % 64, embedding.shape[1])])


def megatron_shard(
    shape: ModelShape, model: dict[str, Tensor], tp: int, r: int, pp: int = 1, stage: int = 0
) -> dict[str, Tensor]:
    """Local-spec parameters of one rank, each [rows, cols]; vocabulary padding is 0."""
    groups, layers = shape.num_query_groups, shape.num_layers // pp

    def grouped(layer: str, kind: str) -> Tensor:
        parts = [matrix(model[f"{layer}self_attn.{n}_proj.{kind}"]).unflatten(0, (groups, -1)) for n in "qkv"]
        return torch.cat(parts, dim=1).flatten(0, 1).chunk(tp)[r]

    shard = (
        {"embedding.word_embeddings.weight": _pad_vocab(model["model.embed_tokens.weight"]).chunk(tp)[r]}
        if stage == 0
        else {}
    )
    for i in range(layers):
        hf, local = f"model.layers.{stage * layers + i}.", f"decoder.layers.{i}."
        shard |= {
            local + "input_layernorm.weight": matrix(model[hf + "input_layernorm.weight"]),
            local + "pre_mlp_layernorm.weight": matrix(model[hf + "post_attention_layernorm.weight"]),
            local + "self_attention.linear_qkv.weight": grouped(hf, "weight"),
            local + "self_attention.linear_proj.weight": model[hf + "self_attn.o_proj.weight"].chunk(
                tp, dim=1
            )[r],
            local + "mlp.linear_fc1.weight": torch.cat(
                [model[f"{hf}mlp.{n}_proj.weight"].chunk(tp)[r] for n in ("gate", "up")]
            ),
            local + "mlp.linear_fc2.weight": model[hf + "mlp.down_proj.weight"].chunk(tp, dim=1)[r],
        }
        if shape.model_type == "qwen2":
            shard[local + "self_attention.linear_qkv.bias"] = grouped(hf, "bias")
        if shape.model_type == "qwen3":
            for n in "qk":
                shard[f"{local}self_attention.{n}_layernorm.weight"] = matrix(
                    model[f"{hf}self_attn.{n}_norm.weight"]
                )
    if stage == pp - 1:
        shard["decoder.final_layernorm.weight"] = matrix(model["model.norm.weight"])
        if "lm_head.weight" in model or pp > 1:
            shard["output_layer.weight"] = _pad_vocab(
                model.get("lm_head.weight", model["model.embed_tokens.weight"])
            ).chunk(tp)[r]
    return shard


def vllm_shard(shape: ModelShape, model: dict[str, Tensor], tp: int, r: int) -> dict[str, Tensor]:
    """Parameters of one vLLM rank, each [rows, cols]; vocabulary padding is 0."""
    groups = shape.num_query_groups
    heads = list(range(groups))[r * groups // tp : (r + 1) * groups // tp] or [r * groups // tp]

    def fused(layer: str, kind: str) -> Tensor:
        q, k, v = (matrix(model[f"{layer}self_attn.{n}_proj.{kind}"]) for n in "qkv")
        return torch.cat(
            [q.chunk(tp)[r], *(t.unflatten(0, (groups, -1))[heads].flatten(0, 1) for t in (k, v))]
        )

    shard = {
        "model.embed_tokens.weight": _pad_vocab(model["model.embed_tokens.weight"]).chunk(tp)[r],
        "model.norm.weight": matrix(model["model.norm.weight"]),
    }
    for i in range(shape.num_layers):
        p = f"model.layers.{i}."
        shard |= {
            p + "self_attn.qkv_proj.weight": fused(p, "weight"),
            p + "self_attn.o_proj.weight": model[p + "self_attn.o_proj.weight"].chunk(tp, dim=1)[r],
            p + "mlp.gate_up_proj.weight": torch.cat(
                [model[f"{p}mlp.{n}_proj.weight"].chunk(tp)[r] for n in ("gate", "up")]
            ),
            p + "mlp.down_proj.weight": model[p + "mlp.down_proj.weight"].chunk(tp, dim=1)[r],
        }
        replicated = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        replicated += (
            ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if shape.model_type == "qwen3" else []
        )
        shard |= {p + name: matrix(model[p + name]) for name in replicated}
        if shape.model_type == "qwen2":
            shard[p + "self_attn.qkv_proj.bias"] = fused(p, "bias")
    if "lm_head.weight" in model:
        shard["lm_head.weight"] = _pad_vocab(model["lm_head.weight"]).chunk(tp)[r]
    return shard

"""Models and layouts whose kept activations run_activations.py measures and test_activations.py compares with
the estimate: rows only."""

from __future__ import annotations

from megarl.config.mesh import MeshSpec, megatron_mesh
from megarl.config.schema import ParallelConfig
from tests.megatron import layouts
from tests.megatron.layouts import CP, EP, ETP1, SP, TP

NUM_SAMPLES, SAMPLE_TOKENS = 2, 256
"""Lengths that no layout pads."""
NUM_TOKENS = NUM_SAMPLES * SAMPLE_TOKENS
_SIZES = dict(
    vocab_size=128,
    hidden_size=160,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
_LATENTS = _SIZES | dict(
    num_key_value_heads=8,
    kv_lora_rank=56,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=20,
    moe_intermediate_size=104,
    n_group=4,
    topk_group=2,
)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=104)
MODELS = {
    "llama": layouts.MODELS["llama_deep"] | _SIZES,
    "qwen2": layouts.MODELS["qwen2_tied"] | _SIZES,
    "qwen3": layouts.MODELS["qwen3"] | _SIZES | dict(head_dim=24),
    "qwen3_moe": layouts.MODELS["qwen3_moe"] | _SIZES | _EXPERTS | dict(head_dim=24),
    "qwen2_moe": dict(
        model_type="qwen2_moe",
        shared_expert_intermediate_size=72,
        norm_topk_prob=True,
        rope_theta=10000.0,
        **_EXPERTS,
        **_SIZES,
    ),
    "mixtral": layouts.MODELS["mixtral"] | _SIZES | dict(num_experts_per_tok=2),
    "deepseek_v2": layouts.MODELS["deepseek_v2"] | _LATENTS,
    "deepseek_v3": layouts.MODELS["deepseek_v3"] | _LATENTS | dict(q_lora_rank=72),
}
"""The models of the equivalence suite, larger, with vocabularies that no layout pads."""


def _full(method: str, layers: int) -> dict[str, object]:
    return dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)


def _selective(*modules: str) -> dict[str, object]:
    return dict(recompute_granularity="selective", recompute_modules=modules)


LAYOUTS = {
    "one": (1, {}),
    "full_1": (1, _full("uniform", 1)),
    "full_2": (1, _full("uniform", 2)),
    "block": (1, _full("block", 2)),
    "core_attn": (1, _selective("core_attn")),
    "layernorm": (1, _selective("layernorm")),
    "mlp": (1, _selective("mlp")),
    "all_modules": (1, _selective("core_attn", "layernorm", "mlp")),
    "tp2": (2, TP),
    "tp2_sp": (2, SP),
    "tp2_sp_full_1": (2, SP | _full("uniform", 1)),
    "tp2_sp_mlp": (2, SP | _selective("mlp")),
    "tp2_sp_layernorm": (2, SP | _selective("layernorm")),
    "tp2_sp_ep2": (2, SP | EP | ETP1),
    "ep2": (2, EP),
    "etp2": (2, dict(expert_tensor_parallel_size=2)),
    "cp2": (2, CP),
    "cp2_ep2": (2, CP | EP),
}
"""Name -> (ranks, flags of ParallelConfig)."""

_OF_MODEL = {
    "qwen3": ("one", "full_1", "layernorm", "mlp", "tp2_sp", "cp2"),
    "qwen3_moe": ("one", "tp2_sp", "ep2", "etp2"),
    "mixtral": ("one",),
    "qwen2_moe": ("one",),
    "deepseek_v3": ("one", "tp2_sp", "tp2_sp_ep2"),
}
_NIGHTLY = {
    "llama": ("one", "tp2", "tp2_sp"),
    "qwen2": ("one", "tp2"),
    "qwen3": (
        "full_2", "block", "core_attn", "all_modules", "tp2",
        "tp2_sp_full_1", "tp2_sp_mlp", "tp2_sp_layernorm",
    ),
    "qwen3_moe": ("full_1", "core_attn", "layernorm", "mlp", "tp2_sp_ep2", "cp2_ep2"),
    "qwen2_moe": ("tp2_sp",),
    "mixtral": ("tp2_sp", "ep2"),
    "deepseek_v2": ("one", "tp2_sp"),
    "deepseek_v3": ("full_1", "core_attn", "layernorm", "mlp", "tp2_sp_full_1", "ep2", "cp2"),
}  # fmt: skip


def _cases(of_model: dict[str, tuple[str, ...]], bf16: bool = False) -> list[tuple[str, str, bool]]:
    return [(model, layout, bf16) for model, layouts in of_model.items() for layout in layouts]


CASES = {
    "default": [*_cases(_OF_MODEL), ("qwen3_moe", "one", True)],
    "nightly": [
        *_cases(_NIGHTLY),
        *_cases(dict.fromkeys(("llama", "qwen3", "qwen2_moe", "deepseek_v3"), ("one", "tp2_sp")), bf16=True),
    ],
}
"""(model, layout, bf16) of the cases that always run, and of those that run every night."""


def name_of(model: str, layout: str, bf16: bool) -> str:
    return f"{model}-{layout}-{'bf16' if bf16 else 'fp32'}"


def parallel_of_case(layout: str) -> ParallelConfig:
    return ParallelConfig(**LAYOUTS[layout][1])


def mesh_of(layout: str) -> MeshSpec:
    count, _ = LAYOUTS[layout]
    return megatron_mesh(tuple(range(count)), parallel_of_case(layout))

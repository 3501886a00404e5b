"""Which model families are built from which Hugging Face configurations and in which layouts they are
compared with transformers. Read by run_families.py and by the test that judges it: rows only, so that another
family is another row.

Every configuration is odd in its own way: key heads, head sizes, tied embeddings, biases, vocabularies that
need padding."""

from __future__ import annotations

from typing import Any

_COMMON = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
_GEMMA = dict(
    head_dim=32,
    sliding_window=8,
    query_pre_attn_scalar=24,
    tie_word_embeddings=True,
    rope_parameters={
        "full_attention": dict(rope_type="default", rope_theta=1e4),
        "sliding_attention": dict(rope_type="default", rope_theta=3e2),
    },
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
)
_LATENTS = dict(
    num_key_value_heads=4,
    kv_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    moe_intermediate_size=24,
    n_shared_experts=2,
    first_k_dense_replace=1,
    num_experts_per_tok=3,
)
_GROUPS = dict(n_routed_experts=8, n_group=4, topk_group=2)
_YARN_OF_DEEPSEEK = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16)

# name -> (configuration class of transformers, its arguments beyond _COMMON)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", dict(vocab_size=130, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "qwen2_odd_heads": (
        "Qwen2Config",
        dict(vocab_size=331, hidden_size=60, num_attention_heads=6, num_key_value_heads=2),
    ),
    "qwen3": ("Qwen3Config", dict(vocab_size=150, head_dim=32)),
    "qwen3_tied_small_heads": (
        "Qwen3Config",
        dict(vocab_size=67, head_dim=8, tie_word_embeddings=True, rope_theta=1e6),
    ),
    "llama": ("LlamaConfig", dict(vocab_size=128, rms_norm_eps=1e-5)),
    "llama_biases": ("LlamaConfig", dict(vocab_size=129, attention_bias=True, mlp_bias=True)),
    "llama3": (
        "LlamaConfig",
        dict(
            vocab_size=128,
            rms_norm_eps=1e-5,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=5e5,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=2.5,
                original_max_position_embeddings=24,
            ),
        ),
    ),
    "llama_linear": (
        "LlamaConfig",
        dict(vocab_size=128, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    ),
    "qwen2_yarn": (
        "Qwen2Config",
        dict(
            vocab_size=130,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32
            ),
        ),
    ),
    "llama_yarn_of_deepseek": (
        "LlamaConfig",
        dict(
            vocab_size=130,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1e4,
                factor=8.0,
                original_max_position_embeddings=16,
                beta_fast=8,
                beta_slow=2,
                mscale=1.0,
                mscale_all_dim=0.5,
                truncate=False,
            ),
        ),
    ),
    "qwen3_one_key": ("Qwen3Config", dict(vocab_size=101, head_dim=24, num_key_value_heads=1)),
    "qwen2_one_key": ("Qwen2Config", dict(vocab_size=101, num_key_value_heads=1)),
    "llama_every_head_its_own_key": (
        "LlamaConfig",
        dict(vocab_size=193, num_key_value_heads=None, rms_norm_eps=1e-5),
    ),
    "mistral": ("MistralConfig", dict(vocab_size=140, head_dim=24, sliding_window=None)),
    "mistral_sliding": ("MistralConfig", dict(vocab_size=140, head_dim=24, sliding_window=7)),
    "gemma3": ("Gemma3TextConfig", dict(vocab_size=150, num_key_value_heads=1, **_GEMMA)),
    "gemma3_27b": (
        "Gemma3TextConfig",
        dict(
            vocab_size=131,
            hidden_size=48,
            **(
                _GEMMA
                | {
                    "query_pre_attn_scalar": 12,
                    "rope_parameters": {
                        "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e4),
                        "sliding_attention": dict(rope_type="default", rope_theta=5e2),
                    },
                }
            ),
        ),
    ),
    "qwen3_moe": ("Qwen3MoeConfig", dict(vocab_size=150, head_dim=32, norm_topk_prob=True, **_EXPERTS)),
    "qwen3_moe_unscaled": (
        "Qwen3MoeConfig",
        dict(vocab_size=97, head_dim=32, norm_topk_prob=False, **_EXPERTS),
    ),
    "qwen3_moe_dense_layers": (
        "Qwen3MoeConfig",
        dict(vocab_size=97, head_dim=32, decoder_sparse_step=2, mlp_only_layers=[3], **_EXPERTS),
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        dict(vocab_size=97, shared_expert_intermediate_size=40, mlp_only_layers=[0], **_EXPERTS),
    ),
    "mixtral": ("MixtralConfig", dict(vocab_size=141, num_local_experts=4)),
    "deepseek_v2": (
        "DeepseekV2Config",
        dict(
            vocab_size=103,
            q_lora_rank=24,
            n_routed_experts=4,
            routed_scaling_factor=1.5,
            rope_parameters=dict(_YARN_OF_DEEPSEEK, mscale=0.707, mscale_all_dim=0.707),
            **_LATENTS,
        ),
    ),
    "deepseek_v2_groups": (
        "DeepseekV2Config",
        dict(vocab_size=103, q_lora_rank=None, topk_method="group_limited_greedy", **_GROUPS, **_LATENTS),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(
            vocab_size=107,
            q_lora_rank=24,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            **_LATENTS,
            **(_GROUPS | dict(n_group=2, topk_group=1)),
        ),
    ),
    "deepseek_v3_yarn": (
        "DeepseekV3Config",
        dict(
            vocab_size=107,
            q_lora_rank=24,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            rope_parameters=dict(_YARN_OF_DEEPSEEK, beta_fast=8, beta_slow=2, mscale=1.0, mscale_all_dim=0.5),
            **_LATENTS,
            **_GROUPS,
        ),
    ),
}

_DENSE = ("one", "tp2", "pp2", "tp2_stacked")
_MOE = (
    "one",
    "tp2_sp",
    "pp2",
    "ep2",
    "tp2_sp_ep2",
)  # Megatron splits attention beside experts with sequence parallelism only
_OTHERS = {
    **dict.fromkeys(("llama3", "llama_linear", "qwen2_yarn", "llama_yarn_of_deepseek"), ("one", "tp2")),
    **dict.fromkeys(
        ("qwen2_one_key", "qwen3_one_key", "gemma3"), ("one", "tp2", "tp2_sp", "pp2")
    ),  # stacked needs whole key heads on each rank
    **dict.fromkeys(("qwen3_moe", "qwen3_moe_unscaled", "mixtral", "deepseek_v2", "deepseek_v3"), _MOE),
    "qwen3_moe_dense_layers": ("one", "pp2", "ep2"),
    "deepseek_v2_groups": ("one", "ep2"),
    **dict.fromkeys(("qwen2_moe", "deepseek_v3_yarn"), ("one", "tp2_sp")),
}
LAYOUTS = {name: _OTHERS.get(name, _DENSE) for name in CONFIGS}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
EVERY_LAYOUT = ("qwen2", "gemma3", "qwen3_moe", "deepseek_v3")
"""Families that the default suite tests in each of their layouts, the others in one rank and in the layout that splits
most: how a layout splits is no matter of the family."""


def _splits_most(layouts: tuple[str, ...]) -> str:
    return next((layout for layout in ("tp2_sp_ep2", "tp2") if layout in layouts), layouts[-1])


QUICK = [
    (name, layout)
    for name, layout in CASES
    if name in EVERY_LAYOUT or layout in ("one", _splits_most(LAYOUTS[name]))
]

_LLAMA3_OF_MEGATRON = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
# name -> what a fault would make of the model's shape, each of which must show in the log-probs: fields of
# ModelShape.
FAULTS: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen2": ({"rope_theta": 5e3}, {"rms_norm_eps": 1e-2}),
    "qwen3": ({"rope_theta": 5e3},),
    "llama": ({"rope_theta": 5e3}, {"rms_norm_eps": 1e-2}),
    "llama3": ({"rope_scaling": None}, {"rope_scaling": _LLAMA3_OF_MEGATRON}),
    "llama_linear": ({"rope_scaling": None},),
    "qwen2_yarn": (
        {"rope_scaling": None},
        {"rope_scaling": _YARN | {"attention_factor": 1.0}},
        {"rope_scaling": _YARN | {"beta_slow": 4}},
    ),
    "mistral": ({"rope_theta": 5e3},),
    "mistral_sliding": (
        {"sliding_window": None},
        {"sliding_window": 8},
        {"sliding_layers": (True, True, True, False)},
    ),
    "gemma3": (
        {"rope_theta": 5e3},
        {"local_rope_theta": 1e4},
        {"sliding_window": 9},
        {"sliding_layers": (True, True, True, True)},
        {"query_pre_attn_scalar": 32.0},
        {"activation": "silu"},
        {"zero_centered_norms": False},
        {"scaled_embeddings": False},
    ),
    "gemma3_27b": ({"rope_scaling": None},),
    "qwen3_moe": ({"norm_topk_prob": False}, {"moe_router_topk": 3}),
    "mixtral": ({"norm_topk_prob": False}, {"rope_theta": 5e3}),
    "deepseek_v2": (
        {"moe_router_topk_scaling_factor": 1.0},
        {"rope_theta": 5e3},
        {"rope_scaling": None},
        {"rope_scaling": _YARN_OF_DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v2_groups": ({"moe_router_group_best": 2}, {"moe_router_group_topk": 3}),
    "deepseek_v3": ({"moe_router_group_best": 1}, {"moe_router_topk_scaling_factor": 1.0}),
    "deepseek_v3_yarn": (
        {"rope_scaling": _YARN_OF_DEEPSEEK | {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
        {
            "rope_scaling": _YARN_OF_DEEPSEEK
            | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.5, "mscale_all_dim": 0.5}
        },
    ),
}


def config(name: str):
    """The family's configuration as transformers has it."""
    import transformers

    kind, arguments = CONFIGS[name]
    return getattr(transformers, kind)(**(_COMMON | arguments))

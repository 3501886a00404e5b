"""Models and layouts of the equivalence suite: read by run_equivalence.py, which runs them, and by
test_equivalence.py, which judges."""

from __future__ import annotations

from dataclasses import dataclass, field

_COMMON = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rope_theta=10000.0,
)
_LATENTS = _COMMON | dict(
    num_key_value_heads=4,
    kv_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    n_shared_experts=2,
    first_k_dense_replace=1,
)
MODELS = {
    "qwen3": dict(model_type="qwen3", vocab_size=150, head_dim=32, tie_word_embeddings=False, **_COMMON),
    "qwen2_tied": dict(model_type="qwen2", vocab_size=130, tie_word_embeddings=True, **_COMMON),
    "biases": dict(
        model_type="llama",
        vocab_size=150,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        **_COMMON,
    ),
    "llama_deep": dict(
        model_type="llama", vocab_size=128, tie_word_embeddings=False, **_COMMON | dict(num_hidden_layers=8)
    ),
    "one_key": dict(
        model_type="qwen3",
        vocab_size=150,
        head_dim=24,
        tie_word_embeddings=True,
        **(_COMMON | {"num_key_value_heads": 1}),
    ),
    "gemma3": dict(
        model_type="gemma3_text",
        vocab_size=150,
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=8,
        sliding_window_pattern=3,
        **(_COMMON | {"num_key_value_heads": 1}),
    ),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        vocab_size=150,
        head_dim=32,
        tie_word_embeddings=False,
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        **_COMMON,
    ),
    "mixtral": dict(model_type="mixtral", vocab_size=141, num_local_experts=4, **_COMMON),
    "deepseek_v2": dict(
        model_type="deepseek_v2",
        vocab_size=103,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        **_LATENTS,
    ),
    "deepseek_v3": dict(
        model_type="deepseek_v3",
        vocab_size=107,
        q_lora_rank=24,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rms_norm_eps=1e-6,
        n_group=2,
        topk_group=1,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=8.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=0.5,
        ),
        **_LATENTS,
    ),
}
"""config.json of each: q/k norms; biases and tied embeddings; neither, and 8 layers; experts; experts under
other names; latent attention and shared experts, after a dense layer. Most vocabularies need padding."""


@dataclass(frozen=True)
class Layout:
    """Where a model is and how it is split.

    Args:
        ranks: of the mesh: 0 to ranks - 1.
        parallel, optimizer: flags of ParallelConfig and OptimizerConfig.
        bf16: compared with one rank in bf16."""

    ranks: int = 1
    parallel: dict[str, object] = field(default_factory=dict)
    optimizer: dict[str, object] = field(default_factory=dict)
    model: str = "qwen3"
    bf16: bool = False


def _layout(
    ranks: int,
    model: str = "qwen3",
    bf16: bool = False,
    distributed: bool = False,
    overlap: bool = False,
    **parallel,
) -> Layout:
    return Layout(
        ranks, parallel, dict(use_distributed_optimizer=distributed, overlap_grad_reduce=overlap), model, bf16
    )


def _sharded(
    ranks: int, model: str = "qwen3", bf16: bool = False, strategy: str = "optim_grads", **parallel
) -> Layout:
    return Layout(
        ranks, parallel, dict(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy), model, bf16
    )


TP = dict(tensor_model_parallel_size=2)
SP = TP | dict(sequence_parallel=True)
PP = dict(pipeline_model_parallel_size=2)
CP = dict(context_parallel_size=2)
VPP = PP | dict(virtual_pipeline_model_parallel_size=2)
EP = dict(expert_model_parallel_size=2)
ETP1 = dict(expert_tensor_parallel_size=1)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = FULL | dict(recompute_method="block")
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=("core_attn", "layernorm", "mlp"))

LAYOUTS = {
    "one": _layout(1),
    "tp2": _layout(2, **TP),
    "tp2_sp": _layout(2, **SP),
    "tp2_sp_stacked": _layout(2, qkv_layout="stacked", **SP),
    "tp2_sp_full": _layout(2, **SP, **FULL),
    "tp2_sp_selective": _layout(2, **SP, **SELECTIVE),
    "tp2_sp_tied": _layout(2, "qwen2_tied", **SP),
    "tp2_sp_biases": _layout(2, "biases", **SP),
    "tp2_one_key": _layout(2, "one_key", **TP),
    "tp2_sp_one_key": _layout(2, "one_key", **SP),
    "tp2_sp_selective_gemma3": _layout(2, "gemma3", **SP, **SELECTIVE),
    "cp2_gemma3": _layout(2, "gemma3", **CP),
    "pp2": _layout(2, **PP),
    "pp2_tied": _layout(2, "qwen2_tied", **PP),
    "pp2_vpp2": _layout(2, **VPP),
    "pp2_vpp2_full": _layout(2, **VPP, **FULL),
    "dp2": _layout(2),
    "dp2_do": _layout(2, distributed=True),
    "dp2_do_overlap": _layout(2, distributed=True, overlap=True),
    "ep2": _layout(2, "qwen3_moe", **EP),
    "tp2_sp_ep2": _layout(2, "qwen3_moe", **SP, **EP, **ETP1),
    "ep2_mixtral": _layout(2, "mixtral", **EP),
    "ep2_latents": _layout(2, "deepseek_v2", **EP),
    "tp2_sp_ep2_latents": _layout(2, "deepseek_v3", **SP, **EP, **ETP1),
    "cp2_latents": _layout(2, "deepseek_v3", **CP),
    "tp2_pp2": _layout(4, **TP, **PP),
    "tp2_sp_dp2_do": _layout(4, distributed=True, **SP),
    "pp2_dp2_tied_do": _layout(4, "qwen2_tied", distributed=True, **PP),
    "tp2_sp_ep2_etp2_do": _layout(4, "qwen3_moe", distributed=True, **SP, **EP),
    "pp2_ep2_full": _layout(4, "qwen3_moe", **PP, **EP, **FULL),
    "cp2": _layout(2, **CP),
    "tp2_sp_cp2": _layout(4, **SP, **CP),
    "cp2_pp2_vpp2_full": _layout(4, **CP, **VPP, **FULL),
    "tp2_sp_pp2_vpp2_selective": _layout(4, **SP, **VPP, **SELECTIVE),
    "pp2_vpp2_ep2_do": _layout(4, "qwen3_moe", distributed=True, **VPP, **EP),
    "pp4": _layout(4, pipeline_model_parallel_size=4),
    "dp2_do_bf16": _layout(2, bf16=True, distributed=True),
    "pp2_vpp2_do_bf16": _layout(2, bf16=True, distributed=True, **VPP),
}
LONG_TAIL = {
    "pp2_block_gemma3": _layout(2, "gemma3", **PP, **BLOCK),
    "pp2_block": _layout(2, **PP, **BLOCK),
    "pp2_vpp2_do": _layout(2, distributed=True, **VPP),
    "pp2_vpp2_tied": _layout(2, "qwen2_tied", **VPP),
    "pp2_vpp2_moe": _layout(2, "qwen3_moe", **VPP),
    "dp2_tied_do": _layout(2, "qwen2_tied", distributed=True),
    "ep2_do": _layout(2, "qwen3_moe", distributed=True, **EP),
    "pp2_moe": _layout(2, "qwen3_moe", **PP),
    "pp2_latents": _layout(2, "deepseek_v3", **PP),
    "tp2_sp_latents_selective": _layout(2, "deepseek_v2", **SP, **SELECTIVE),
    "cp2_do": _layout(2, distributed=True, **CP),
    "cp2_full": _layout(2, **CP, **FULL),
    "cp2_ep2": _layout(2, "qwen3_moe", **CP, **EP),
    "cp4_tied": _layout(4, "qwen2_tied", context_parallel_size=4),
    "cp2_dp2_do": _layout(4, distributed=True, **CP),
    "cp2_pp2_do": _layout(4, distributed=True, **CP, **PP),
    "tp2_sp_cp2_ep2": _layout(4, "qwen3_moe", **SP, **CP, **EP, **ETP1),
    "pp2_vpp2_dp2_do_overlap": _layout(4, distributed=True, overlap=True, **VPP),
    "pp2_vpp2_dp2_tied_do": _layout(4, "qwen2_tied", distributed=True, **VPP),
    "pp4_vpp2": _layout(4, "llama_deep", **VPP | dict(pipeline_model_parallel_size=4)),
    "dp2_tied_do_bf16": _layout(2, "qwen2_tied", bf16=True, distributed=True),
    "dp2_overlap": _layout(2, overlap=True),
    "dp2_tied_do_overlap": _layout(2, "qwen2_tied", distributed=True, overlap=True),
    "ep2_do_overlap": _layout(2, "qwen3_moe", distributed=True, overlap=True, **EP),
    "ep2_full": _layout(2, "qwen3_moe", **EP, **FULL),
    "tp2_sp_ep2_selective": _layout(2, "qwen3_moe", **SP, **EP, **ETP1, **SELECTIVE),
    "pp2_vpp2_deep_full": _layout(2, "llama_deep", **VPP, **FULL | dict(recompute_num_layers=2)),
    "pp2_vpp2_deep_block": _layout(2, "llama_deep", **VPP, **BLOCK),
    "pp2_vpp4_deep": _layout(2, "llama_deep", **VPP | dict(virtual_pipeline_model_parallel_size=4)),
    "tp2_sp_dp2_do_overlap": _layout(4, distributed=True, overlap=True, **SP),
    "pp2_dp2_tied_do_overlap": _layout(4, "qwen2_tied", distributed=True, overlap=True, **PP),
    "pp2_vpp2_dp2_tied_overlap": _layout(4, "qwen2_tied", overlap=True, **VPP),
    "pp2_vpp2_ep2_do_overlap": _layout(4, "qwen3_moe", distributed=True, overlap=True, **VPP, **EP),
    "dp2_fsdp": _sharded(2),
    "dp2_fsdp_biases": _sharded(2, "biases", strategy="optim"),
    "dp4_fsdp": _sharded(4, "llama_deep"),
    "dp2_fsdp_bf16": _sharded(2, bf16=True),
    "dp2_fsdp_full": _sharded(2, **FULL),
    "dp2_fsdp_tied": _sharded(2, "qwen2_tied"),
    "cp2_fsdp": _sharded(2, **CP),
    "dp2_fsdp_optim": _sharded(2, strategy="optim"),
    "dp2_fsdp_optim_bf16": _sharded(2, bf16=True, strategy="optim"),
    "dp2_fsdp_optim_tied": _sharded(2, "qwen2_tied", strategy="optim"),
    "tp2_sp_bf16": _layout(2, bf16=True, **SP),
    "pp2_bf16": _layout(2, bf16=True, **PP),
}
"""Combinations of what is in the others; slow tests."""
LAYOUTS |= LONG_TAIL
PACKINGS = {"packed": 60, "single": 1}
"""max_tokens of a micro-batch: several samples in one, or each in its own. A packed actor's loss is token by
token, a single one's sees its micro-batch as a whole."""
MUTANTS = {"local_token_count": "dp2", "unmarked_norms": "tp2_sp", "own_key_gradient": "cp2"}
"""Planted faults -> the layout in which they are: the mean of the ranks' own means per token; norms that
sequence parallelism does not know; gradients of keys and values from a rank's own queries alone."""

CASES = [
    f"{name}/{role}/{packing}"
    for name, layout in LAYOUTS.items()
    for role in ("actor", "critic")
    for packing in PACKINGS
    if role == "actor" or not (layout.bf16 or layout.model == "qwen2_tied")
]
"""A critic's embeddings are not tied."""
CRITICS = ("one", "tp2_sp", "pp2_vpp2", "dp2_do", "ep2", "cp2")
"""Layouts whose critic the default suite tests too: the actor's model with another last layer."""
ON_FOUR_RANKS = ("tp2_sp_dp2_do", "cp2_pp2_vpp2_full", "tp2_sp_ep2_etp2_do")
"""Layouts of four ranks that the default suite tests: every dimension is in one of them."""
COVERED = {
    "tp2": "tp2_one_key",
    "tp2_sp_stacked": "tp2_sp, and tp2_sp_stacked_sharded of test_lora.py",
    "tp2_sp_full": "test_experts.py's tp2_sp_ep2_full",
    "tp2_sp_selective": "tp2_sp_selective_gemma3",
    "tp2_sp_tied": "tp2_sp and pp2_tied",
    "cp2_gemma3": "cp2 and tp2_sp_selective_gemma3",
    "pp2": "pp2_tied",
    "pp2_vpp2_full": "cp2_pp2_vpp2_full",
    "pp2_vpp2_do_bf16": "pp2_vpp2 and dp2_do_bf16",
    "ep2_mixtral": "ep2, and the family in tp2_sp_ep2 in test_families.py",
    "ep2_latents": "tp2_sp_ep2_latents and cp2_latents",
}
"""Layouts of two ranks that run nightly only -> tests of the default suite that cover the same features."""
QUICK = [
    case
    for case in CASES
    for layout, _, kind in [case.partition("/")]
    if layout not in LONG_TAIL
    and layout not in COVERED
    # dp2_do_overlap and tp2_sp_ep2 have the same, and the critics are tested
    and case not in ("dp2_do/actor/packed", "ep2/actor/packed")
    and (LAYOUTS[layout].ranks <= 2 or layout in ON_FOUR_RANKS)
    and (kind == "actor/packed" or kind == "critic/single" and layout in CRITICS)
]
PLANTED = [f"{layout}/actor/packed/{mutant}" for mutant, layout in MUTANTS.items()]

"""ModelShape against transformers' own reading of the same config.json, and the keys that must not be
ignored.

pytest tests/config/test_hf_config.py"""

import pytest
import torch

from megarl.config.errors import ConfigError
from megarl.config.hf_config import ModelShape

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
QWEN2 = {"model_type": "qwen2", **SIZES}
QWEN3 = {"model_type": "qwen3", **SIZES, "head_dim": 32}
LLAMA = {"model_type": "llama", **SIZES}
MISTRAL = {"model_type": "mistral", **SIZES, "sliding_window": None}
GEMMA = {"model_type": "gemma3_text", **SIZES, "num_key_value_heads": 1, "head_dim": 32}
MOE = {
    "model_type": "qwen3_moe",
    **SIZES,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 4}
_LATENTS = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V2 = {"model_type": "deepseek_v2", **_LATENTS}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    **_LATENTS,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

# As in Qwen2.5-0.5B-Instruct, Qwen3-0.6B and Llama-3.2-1B, smaller; then the way transformers 5 writes them;
# then with keys left out.
CONFIGS = {
    "qwen2.5": {
        **QWEN2,
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": 32768,
        "max_window_layers": 1,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 7,
        "use_mrope": False,
    },
    "qwen3": {
        **QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 5,
        "layer_types": ["full_attention"] * 2,
    },
    "llama3.2": {
        **LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "head_dim": 16,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": [3, 4, 5],
    },
    "qwen2 of transformers 5": {
        **QWEN2,
        "dtype": "float32",
        "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
        "rms_norm_eps": 1e-5,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
    },
    "llama3 of transformers 5": {
        **LLAMA,
        "dtype": "bfloat16",
        "rope_parameters": {**LLAMA3, "rope_theta": 500000.0, "rope_type": "llama3"},
    },
    "mistral 0.3": {
        **MISTRAL,
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    },
    "qwen3-30b-a3b": {
        **MOE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    },
    "mistral, keys left out": {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    | {"num_attention_heads": 8},
    "qwen3_moe, keys left out": {
        "model_type": "qwen3_moe",
        **SIZES,
        "num_experts": 8,
        "moe_intermediate_size": 24,
    },
    "qwen2, old rope key": {**QWEN2, "rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    "qwen2, keys left out": QWEN2,
    "qwen3, keys left out": {key: value for key, value in QWEN3.items() if key != "head_dim"},
    "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama with biases in attention": {**LLAMA, "attention_bias": True},
    "llama2": {
        **{key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "eos_token_id": 2,
    },
    "qwen2.5 with yarn, as its card says": {
        **QWEN2,
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 128, "type": "yarn"},
    },
    "yarn, every key": {
        **QWEN3,
        "max_position_embeddings": 512,
        "rope_parameters": {
            **YARN,
            "rope_theta": 1e6,
            "beta_fast": 16,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    },
    "yarn, its original length beside it": {
        **LLAMA,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    },
    "yarn, null in place of its own factor": {
        **QWEN3,
        "max_position_embeddings": 512,
        "rope_scaling": {**YARN, "attention_factor": None},
    },
    "mistral 0.1, a window": {**MISTRAL, "sliding_window": 4096, "max_position_embeddings": 32768},
    "mistral, a window by default": {key: value for key, value in MISTRAL.items() if key != "sliding_window"},
    "gemma-3-1b": {
        **GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "eos_token_id": [1, 106],
    },
    "gemma 3, scaled": {
        **GEMMA,
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "query_pre_attn_scalar": 168,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": False,
    },
    "gemma 3 of transformers 5": {
        **GEMMA,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    },
    "gemma 3, keys left out": {
        key: value for key, value in GEMMA.items() if key not in ("num_key_value_heads", "head_dim")
    },
    "linear": {**MISTRAL, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama, keys left out": {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    "qwen2, 32 key-value heads by default": {
        key: value for key, value in QWEN2.items() if key != "num_key_value_heads"
    }
    | {"num_attention_heads": 64},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_shape_is_what_transformers_reads(name, write_model):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_model(CONFIGS[name])
    shape, theirs = ModelShape.load(folder), AutoConfig.from_pretrained(folder)
    theirs.standardize_rope_params()  # as every rotary embedding does before it reads them
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert (
        shape.model_type,
        shape.num_layers,
        shape.hidden_size,
        shape.num_attention_heads,
        shape.num_query_groups,
        shape.ffn_hidden_size,
    ) == (
        theirs.model_type,
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.intermediate_size,
    )
    assert (
        shape.vocab_size,
        shape.tie_word_embeddings,
        shape.rms_norm_eps,
        shape.max_position_embeddings,
        shape.rope_theta,
    ) == (
        theirs.vocab_size,
        theirs.tie_word_embeddings,
        theirs.rms_norm_eps,
        theirs.max_position_embeddings,
        rope["rope_theta"],
    )
    wanted = {
        key: value for key, value in rope.items() if key not in ("rope_theta", "type") and value is not None
    }
    assert shape.rope_scaling == (wanted if rope["rope_type"] != "default" else None)
    eos = theirs.eos_token_id
    assert shape.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    sliding = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", None) or ()]
    if shape.model_type == "gemma3_text":
        assert (shape.query_pre_attn_scalar, shape.sliding_window) == (
            theirs.query_pre_attn_scalar,
            theirs.sliding_window,
        )
        assert shape.local_rope_theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
        assert list(shape.sliding_layers) == sliding and any(sliding)
    else:
        assert shape.sliding_window == (
            theirs.sliding_window if shape.model_type == "mistral" else None
        ) and not any(sliding)
        assert shape.sliding_layers == ((True,) * shape.num_layers if shape.sliding_window else ())
    assert shape.torch_dtype == str(theirs.dtype or "float32").removeprefix("torch.")
    assert shape.is_moe == (shape.model_type == "qwen3_moe")
    if shape.is_moe:
        assert (
            shape.num_moe_experts,
            shape.moe_router_topk,
            shape.moe_ffn_hidden_size,
            shape.norm_topk_prob,
        ) == (
            theirs.num_experts,
            theirs.num_experts_per_tok,
            theirs.moe_intermediate_size,
            theirs.norm_topk_prob,
        )

    model = AutoModelForCausalLM.from_config(
        theirs
    )  # biases, norms and head sizes are in no config key of every family
    assert (
        model.config.architectures in (None, [shape.architecture])
        and type(model).__name__ == shape.architecture
    )
    attention, state = model.model.layers[0].self_attn, model.state_dict()
    assert (
        attention.head_dim == shape.head_dim
        and attention.q_proj.out_features == shape.num_attention_heads * shape.head_dim
    )
    assert hasattr(attention, "q_norm") == shape.qk_layernorm
    assert (
        ("model.layers.0.pre_feedforward_layernorm.weight" in state)
        == shape.output_norms
        == shape.zero_centered_norms
    )
    assert torch.equal(
        model.model.norm.weight.cpu(), torch.zeros(64) if shape.zero_centered_norms else torch.ones(64)
    )
    biases = {
        key.removeprefix("model.layers.0.")
        for key in state
        if key.startswith("model.layers.0.") and key.endswith(".bias")
    }
    wanted = {f"self_attn.{name}_proj.bias" for name in "qkv" if shape.qkv_bias} | (
        {"self_attn.o_proj.bias"} if shape.o_bias else set()
    )
    assert biases == wanted | {f"mlp.{name}_proj.bias" for name in ("gate", "up", "down") if shape.mlp_bias}


def test_a_value_model_comes_from_a_causal_language_model_or_a_classifier_with_one_label(write_model):
    causal, classifier = (
        {**QWEN2, "tie_word_embeddings": True},
        {**QWEN2, "architectures": ["Qwen2ForSequenceClassification"]},
    )
    shape = ModelShape.load(write_model(causal), value_head=True)
    assert (shape.value_head, shape.tie_word_embeddings, shape.architecture) == (
        True,
        False,
        "Qwen2ForSequenceClassification",
    )
    assert ModelShape.load(write_model({**classifier, "id2label": {"0": "reward"}}), value_head=True) == shape
    with pytest.raises(
        ConfigError,
        match=r"num_labels \(2\): must be 1, the value. Use a Qwen2ForSequenceClassification with "
        r"num_labels=1, or a",
    ):
        ModelShape.load(write_model(classifier), value_head=True)  # 2 is transformers' default
    with pytest.raises(ConfigError, match=r"num_labels \(3\): must be 1"):
        ModelShape.load(
            write_model({**classifier, "id2label": {"0": "a", "1": "b", "2": "c"}}), value_head=True
        )
    with pytest.raises(
        ConfigError,
        match=r"architectures \(Qwen2Model\): must be Qwen2ForCausalLM, a causal .*, or "
        r"Qwen2ForSequenceClassif",
    ):
        ModelShape.load(write_model({**QWEN2, "architectures": ["Qwen2Model"]}), value_head=True)


def test_end_of_sequence_ids_of_both_files(write_model):
    """Qwen's instruct models stop at ids that only generation_config.json has."""
    assert ModelShape.load(
        write_model({**QWEN2, "eos_token_id": 7}, {"eos_token_id": [9, 7]})
    ).eos_token_ids == (7, 9)
    assert ModelShape.load(
        write_model({**QWEN2, "eos_token_id": [7, 8]}, {"eos_token_id": 8})
    ).eos_token_ids == (7, 8)
    assert (
        ModelShape.load(write_model({**QWEN2, "eos_token_id": None}, {"do_sample": True})).eos_token_ids == ()
    )


@pytest.mark.parametrize(
    "config, line",
    [
        (
            {**QWEN2, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "use_sliding_window (true, sliding_window 64): ",
        ),
        (
            {**QWEN3, "use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window (true, sliding_window 4096): ",
        ),
        (
            {**MOE, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "use_sliding_window (True): sliding windows are not supported for this family.",
        ),
        (
            {**MOE, "model_type": "qwen2_moe", "head_dim": 16, "use_sliding_window": True},
            "use_sliding_window (True): sliding windows are not supported for this family.",
        ),
        (
            {**QWEN2, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types (sliding_attention): ",
        ),
        (
            {**LLAMA, "sliding_window": 64},
            "sliding_window (64): vLLM would slide and transformers would not.",
        ),
        (
            {**GEMMA, "final_logit_softcapping": 30.0},
            "final_logit_softcapping (30.0): capped logits are not supported.",
        ),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping (50.0): capped attention"),
        ({**GEMMA, "hidden_activation": "gelu"}, "hidden_activation (gelu): only gelu_pytorch_tanh"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention (True): only causal"),
        ({**GEMMA, "sliding_window": None}, "sliding_window (None): must be a positive whole number."),
        (
            {**GEMMA, "layer_types": ["full_attention"]},
            "layer_types (1 of them): must be one for each of the num_hidden_layers (2).",
        ),
        (
            {**GEMMA, "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types (chunked_attention): must be one of sliding_attention, ",
        ),
        ({**GEMMA, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar (0): must be above 0."),
        (
            {**GEMMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_parameters (rope_type, rope_theta): must be under sl",
        ),
        (
            {**GEMMA, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type of sliding_attention (linear): ",
        ),
        (
            {**GEMMA, "rope_parameters": {"full_attention": YARN}},
            "rope_type of full_attention (yarn): must be default, linear or llama3; YaRN scales the ",
        ),
        ({**GEMMA, "rope_scaling": YARN}, "rope_type of full_attention (yarn): must be default, "),
        (
            {**GEMMA, "rope_scaling": {"type": "linear", "factor": 8.0}},
            "type (linear): contradicts rope_type (default). Write one of them.",
        ),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act (gelu): "),
        ({**LLAMA, "attention_bias": "yes"}, "attention_bias (yes): must be true or false."),
        ({**QWEN3, "attention_bias": True}, "attention_bias (True): it adds a bias to o_proj as well, which"),
        ({**MISTRAL, "mlp_bias": True}, "mlp_bias (True): "),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}},
            "factor (2): vLLM takes it as a number with a point only. Write 2.0.",
        ),
        ({**QWEN2, "rope_scaling": {"rope_type": "linear"}}, "rope_type (linear): needs factor."),
        (
            {
                **QWEN2,
                "rope_scaling": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64},
            },
            "factor (0.5): must be at least 1.",
        ),
        (
            {**QWEN2, "rope_scaling": {"rope_type": "yarn", "factor": None}},
            "rope_type (yarn): needs factor and original_max_position_emb",
        ),
        (
            {**QWEN2, "rope_scaling": {**YARN, "beta_fast": None}},
            "rope_type (yarn): beta_fast (None) must be a positive number.",
        ),
        (
            {**QWEN2, "rope_scaling": {**YARN, "truncate": 1}},
            "rope_type (yarn): truncate (1) must be true or false.",
        ),
        (
            {**QWEN2, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}},
            "rope_parameters (mrope_section): keys that change",
        ),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "rope_type (longrope): two sets of frequencies, by",
        ),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "su"}},
            "rope_type (su): is not known; must be one of default, linear, llama3, yarn.",
        ),
        ({**QWEN3, "partial_rotary_factor": 0.5}, "partial_rotary_factor (0.5)"),
        (
            {**QWEN3, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
            "rope_type (dynamic): transformers scales by the length of each",
        ),
        (
            {**QWEN3, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters (full_attention): ",
        ),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_type (llama3): needs low_freq_factor and high_freq_factor and original_max",
        ),
        (
            {**LLAMA, "rope_scaling": {**LLAMA3, "rope_type": "llama3", "high_freq_factor": 1.0}},
            "high_freq_factor (1.0): must be above low_freq_factor (1.0).",
        ),
        (
            {**QWEN2, "architectures": ["Qwen2ForSequenceClassification"]},
            "architectures (Qwen2ForSequenceClassification): must be Qwen2ForCausalLM",
        ),
        ({**QWEN2, "quantization_config": {"quant_method": "awq"}}, "quantization_config ("),
        ({**QWEN2, "head_dim": 999}, "head_dim (999): must be hidden_size / num_attention_heads"),
        ({**QWEN2, "num_key_value_heads": 3}, "num_key_value_heads (3): "),
        ({**QWEN2, "hidden_size": "64"}, "hidden_size (64): must be a positive whole number."),
        ({"model_type": "qwen3"}, "hidden_size (missing): "),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window (0): must be a positive whole number, or null."),
        (
            {**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types (sliding_attention): only full_attention",
        ),
        (
            {**SIZES, "model_type": "gemma"},
            "model_type (gemma): is another architecture, which is not supported; it must be one of "
            "qwen2, qwen3,",
        ),
        (
            {**SIZES, "model_type": "qwen4_moe"},
            "model_type (qwen4_moe): must be one of qwen2, qwen3, qwen3_moe, qwen2_moe, llama",
        ),
        ({**MOE, "decoder_sparse_step": 0}, "decoder_sparse_step (0): must be a positive whole number."),
        (
            {**MOE, "decoder_sparse_step": 99},
            "num_hidden_layers (2): none of them is a mixture of experts by decoder_sparse_step.",
        ),
        ({**MOE, "mlp_only_layers": 1}, "mlp_only_layers (1): must be a list of layer numbers."),
        (
            {**MOE, "shared_expert_intermediate_size": 8},
            "shared_expert_intermediate_size (8): must be 0; this model has no shared experts",
        ),
        ({**MIXTRAL, "sliding_window": 4096}, "sliding_window (4096): "),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise (0.1): must be 0.0; noise"),
        (
            {**MIXTRAL, "num_local_experts": 1},
            "num_experts_per_tok (2): must be at most num_local_experts (1).",
        ),
        ({**MIXTRAL, "num_experts_per_tok": 1}, "norm_topk_prob (true): with num_experts_per_tok 1"),
        (
            {**DEEPSEEK_V2, "topk_method": "noaux_tc"},
            "topk_method (noaux_tc): must be greedy or group_limited_greedy; transformers",
        ),
        (
            {**DEEPSEEK_V2, "scoring_func": "sigmoid"},
            "scoring_func (sigmoid): must be softmax; transformers ignores the key",
        ),
        (
            {**DEEPSEEK_V2, "norm_topk_prob": True},
            "norm_topk_prob (True): must be False; transformers ignores the key",
        ),
        ({**DEEPSEEK_V2, "moe_layer_freq": 2}, "moe_layer_freq (2): must be 1; transformers ignores the key"),
        (
            {**DEEPSEEK_V2, "topk_method": "group_limited_greedy"},
            "n_group (None): must divide n_routed_experts (4)",
        ),
        (
            {**DEEPSEEK_V2, "n_group": 2},
            "n_group (2): must be 1 with topk_method greedy; transformers then ignores the key",
        ),
        (
            {**DEEPSEEK_V2, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type (linear): must be default or yarn for this model.",
        ),
        (
            {
                **DEEPSEEK_V2,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2.0,
                    "mscale": 1.0,
                    "original_max_position_embeddings": 16,
                },
            },
            "mscale and mscale_all_dim: must be there both or",
        ),
        (
            {**DEEPSEEK_V2, "num_key_value_heads": 2},
            "num_key_value_heads (2): must be num_attention_heads (4)",
        ),
        (
            {**DEEPSEEK_V2, "num_experts_per_tok": None},
            "num_experts_per_tok (missing): must be a positive whole number.",
        ),
        (
            {**DEEPSEEK_V2, "first_k_dense_replace": 2},
            "num_hidden_layers (2): none of them is a mixture of experts by first_k_dense_replace",
        ),
        ({**DEEPSEEK_V2, "rms_norm_eps": 1e-5}, "rms_norm_eps (1e-05): must be 1e-06."),
        ({**DEEPSEEK_V2, "qk_rope_head_dim": 7}, "qk_rope_head_dim (7): must be even."),
        ({**DEEPSEEK_V2, "kv_lora_rank": 0}, "kv_lora_rank (0): must be a positive whole number."),
        ({**DEEPSEEK_V2, "q_lora_rank": -1}, "q_lora_rank (-1): must be a positive whole number, or null."),
        (
            {**DEEPSEEK_V3, "scoring_func": None},
            "scoring_func (missing): must be sigmoid; transformers assumes this value",
        ),
        (
            {**DEEPSEEK_V3, "topk_method": None},
            "topk_method (missing): must be noaux_tc; transformers assumes this value",
        ),
        ({**DEEPSEEK_V3, "norm_topk_prob": False}, "norm_topk_prob (False): must be True; Megatron"),
        (
            {**DEEPSEEK_V3, "n_group": 4},
            "n_group (4): must divide n_routed_experts (4) into groups of at least 2.",
        ),
        ({**DEEPSEEK_V3, "topk_group": 3}, "topk_group (3): must be at most n_group (2)"),
        (
            {**DEEPSEEK_V3, "topk_group": 1, "num_experts_per_tok": 3},
            "topk_group (1): must be at most n_group (2), and its groups must have",
        ),
        ({**DEEPSEEK_V3, "rope_interleave": False}, "rope_interleave (false): must be true"),
        ({**MOE, "num_experts_per_tok": 5}, "num_experts_per_tok (5): must be at most num_experts (4)."),
        ({**MOE, "num_experts": 0}, "num_experts (0): must be a positive whole number."),
        (
            {**MOE, "num_experts_per_tok": 1, "norm_topk_prob": True},
            "norm_topk_prob (true): with num_experts_per_tok 1",
        ),
        ({**QWEN3, "rms_norm_eps": "1e-6"}, "rms_norm_eps (1e-6): must be a positive number."),
        ({**QWEN3, "rope_theta": [1e4]}, "rope_theta ([10000.0]): must be a positive number."),
        ({**QWEN3, "rope_parameters": {"rope_theta": {}}}, "rope_theta ({}): must be a positive number."),
        (
            {**QWEN3, "rope_parameters": {"rope_theta": None}},
            "rope_theta (null): must be a positive number, or be left out.",
        ),
        ({**QWEN3, "rope_parameters": 5}, "rope_parameters (5): must be an object."),
        (
            {**QWEN3, "eos_token_id": ["</s>"]},
            "eos_token_id (['</s>']): must be a token id, or a list of them.",
        ),
        ({**QWEN3, "layer_types": 3}, "layer_types (3): must be a list of names."),
        (
            {**QWEN3, "num_hidden_layers": 10**9},
            "num_hidden_layers (1000000000): must be a positive whole number, at most 10000.",
        ),
        (
            {**QWEN3, "head_dim": "32", "vocab_size": True},
            "vocab_size (True): must be a positive whole number.",
        ),
        (
            {**GEMMA, "sliding_window_pattern": 0},
            "sliding_window_pattern (0): must be a whole number above 0.",
        ),
        ({}, "model_type (missing): "),
    ],
)
def test_refused(config, line, write_model):
    folder = write_model(config)
    with pytest.raises(ConfigError) as caught:
        ModelShape.load(folder)
    assert caught.value.errors[0].startswith(line) and caught.value.errors[0].endswith(
        f"[{folder / 'config.json'}]"
    )


def test_every_finding_of_one_file(write_model):
    with pytest.raises(ConfigError) as caught:
        ModelShape.load(
            write_model({**QWEN2, "hidden_act": "gelu", "rope_scaling": {"type": "yarn"}, "vocab_size": 0})
        )
    assert len(caught.value.errors) == 3


def test_unused_sliding_window_and_dropout_are_no_reason_to_refuse(write_model):
    config = {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 2,
        "attention_dropout": 0.1,
    }
    assert ModelShape.load(write_model(config)) == ModelShape.load(write_model(QWEN2, name="plain"))


def test_files_that_cannot_be_read(tmp_path, write_model):
    for prepare, words in [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.write_text("{"), "is not JSON"),
        (lambda path: path.write_text("[]"), "must hold a JSON object"),
        (lambda path: path.write_bytes(b"\xff"), "is not JSON"),
    ]:
        prepare(tmp_path / "config.json")
        with pytest.raises(ConfigError) as caught:
            ModelShape.load(tmp_path)
        assert str(caught.value).startswith(f"--model ({tmp_path}): ") and words in str(caught.value)
    folder = write_model(QWEN2)
    (folder / "generation_config.json").write_text("nonsense")
    with pytest.raises(ConfigError, match="generation_config.json is not JSON"):
        ModelShape.load(folder)


def test_padded_vocabulary(write_model):
    """Multiples of 64, as vLLM pads (VocabParallelEmbedding's DEFAULT_VOCAB_PADDING_SIZE)."""
    for size, padded in [(283, 320), (320, 320), (1, 64), (151936, 151936), (151665, 151680)]:
        assert ModelShape.load(write_model({**QWEN2, "vocab_size": size})).padded_vocab_size() == padded


@pytest.mark.parametrize("name", ("qwen3_next", "llama4", "gemma3", "smollm3", "gpt2", "deepseek_v4"))
def test_another_architecture_is_called_that(write_model, name):
    """Not taken for a typing error, however near the name of a supported one is."""
    with pytest.raises(ConfigError) as error:
        ModelShape.load(write_model({**QWEN2, "model_type": name}))
    assert (
        f"model_type ({name}): is another architecture, which is not supported; it must be one of "
        "qwen2, qwen3," in str(error.value)
    )
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("Qwen3", "qwen3"),
        ("qwen-3", "qwen3"),
        ("qwen3moe", "qwen3_moe"),
        ("lama", "llama"),
        ("qwen4", None),
        ("qwen3_next2", None),
        ("mixtral8", None),
        ("something", None),
    ],
)
def test_a_typing_error_is_put_right(write_model, name, meant):
    with pytest.raises(ConfigError) as error:
        ModelShape.load(write_model({**QWEN2, "model_type": name}))
    assert str(error.value).partition(" Did you mean ")[2].partition("?")[0] == (meant or "")


def test_of_a_run_its_export_is_proposed(tmp_path):
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "config.json").write_text("{}")
    (tmp_path / "run" / "hf").mkdir(parents=True)
    for proposed in ("near", "run/hf"):
        with pytest.raises(ConfigError) as error:
            ModelShape.load(str(tmp_path / "run"))
        assert str(error.value).endswith(f"No such file or directory. Try {tmp_path / proposed}.")
        (tmp_path / "run" / "hf" / "config.json").write_text("{}")

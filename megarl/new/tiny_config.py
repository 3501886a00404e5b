"""Choose the sizes of a tiny model of any supported family, and write them as its config.json. Imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.errors import Errors, did_you_mean, divisors, try_numbers
from megarl.config.hf_families import FAMILIES, Json

HEAD_DIM = 32
"""Default size of a head: the smallest that vLLM's attention has kernels for on a CPU."""
_LATENT, _ROTARY = 512, 64
"""Sizes of DeepSeek's latents and of the rotary part of a head. vLLM has no others on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySizes:
    """Sizes of a tiny model; None means a default that fits the others.

    Example: `TinySizes(family="qwen3", hidden=64)` has 2 layers, 2 heads of 32 and one key-value head."""

    family: str = "qwen3"
    hidden: int = 128
    layers: int = 2
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    context: int = 512
    dtype: str = "float32"

    @property
    def num_heads(self) -> int:
        return self.heads or max(1, self.hidden // HEAD_DIM)

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads: by default half the heads, in DeepSeek one for each head."""
        if self.kv_heads is not None or FAMILIES[self.family].has_latents or self.num_heads % 2:
            return self.kv_heads or self.num_heads
        return self.num_heads // 2

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn or 2 * self.hidden

    @property
    def num_experts(self) -> int:
        return self.experts or 4

    @property
    def num_experts_per_token(self) -> int:
        return self.experts_per_token or min(2, self.num_experts)


def size_errors(sizes: TinySizes) -> Errors:
    """Yield an error per size that does not fit the others, with a value that does."""
    family = FAMILIES.get(sizes.family)
    if family is None:
        guess = did_you_mean(sizes.family, FAMILIES, prefix="")
        yield f"--family ({sizes.family}): must be one of {', '.join(FAMILIES)}.{guess}"
        return
    if sizes.heads is None and sizes.hidden % HEAD_DIM:
        yield (
            f"--hidden ({sizes.hidden}): must be a multiple of {HEAD_DIM}, the size of a head unless --heads "
            f"is given. Try {_near(sizes.hidden)}."
        )
    elif sizes.hidden % sizes.num_heads:
        advice = try_numbers(divisors(sizes.hidden), sizes.num_heads)
        yield f"--heads ({sizes.num_heads}): must divide --hidden ({sizes.hidden}).{advice}"
    elif sizes.head_dim % 2:
        fits = [heads for heads in divisors(sizes.hidden) if sizes.hidden // heads % 2 == 0]
        yield (
            f"--heads ({sizes.num_heads}): heads of --hidden ({sizes.hidden}) / {sizes.num_heads} = "
            f"{sizes.head_dim} must have an even size, for rotary embeddings."
            f"{try_numbers(fits, sizes.num_heads) if fits else f' Try --hidden {_near(sizes.hidden)}.'}"
        )
    if family.has_latents and sizes.kv_heads not in (None, sizes.num_heads):
        yield (
            f"--kv-heads ({sizes.kv_heads}): must be --heads ({sizes.num_heads}) for {sizes.family}, whose "
            "heads have keys of their own. Leave it out."
        )
    elif sizes.num_heads % sizes.num_kv_heads:
        advice = try_numbers(divisors(sizes.num_heads), sizes.num_kv_heads)
        yield f"--kv-heads ({sizes.kv_heads}): must divide --heads ({sizes.num_heads}).{advice}"
    if not family.is_moe:
        for flag, value in (
            ("--experts", sizes.experts),
            ("--experts-per-token", sizes.experts_per_token),
        ):
            if value is not None:
                moe = ", ".join(name for name, other in FAMILIES.items() if other.is_moe)
                yield f"{flag} ({value}): {sizes.family} has no experts. Leave it out, or try --family {moe}."
    elif sizes.num_experts_per_token > sizes.num_experts:
        yield (
            f"--experts-per-token ({sizes.num_experts_per_token}): must be at most --experts "
            f"({sizes.num_experts}). Try {min(2, sizes.num_experts)}."
        )


def _near(hidden: int) -> int:
    """Return the multiple of the default head size that is next to `hidden`, but not 0."""
    return max(1, round(hidden / HEAD_DIM)) * HEAD_DIM


def hf_config(sizes: TinySizes, vocab_size: int, eos_id: int, pad_id: int) -> Json:
    """Return the content of config.json. The sizes must have no errors."""
    family = FAMILIES[sizes.family]
    config: Json = {
        "architectures": [family.architecture],
        "model_type": sizes.family,
        "dtype": sizes.dtype,
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": sizes.context,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "use_cache": True,
    }
    return _of_family(config, sizes)


def _of_family(config: Json, sizes: TinySizes) -> Json:
    """Return the configuration with the keys that only the family has, and without those that it lacks."""
    experts: Json = {
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.num_experts_per_token,
        "moe_intermediate_size": sizes.ffn_size,
    }
    dropped: tuple[str, ...] = ()
    match sizes.family:
        case "qwen2":
            config, dropped = config | {"use_sliding_window": False}, ("head_dim", "attention_bias")
        case "qwen2_moe":
            config |= experts | {"shared_expert_intermediate_size": sizes.ffn_size, "norm_topk_prob": False}
            dropped = ("head_dim", "attention_bias")
        case "qwen3_moe":
            config |= experts | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        case "llama":
            config |= {"mlp_bias": False}
        case "mistral":
            config, dropped = config | {"sliding_window": None}, ("attention_bias",)
        case "mixtral":
            config |= {
                "num_local_experts": sizes.num_experts,
                "num_experts_per_tok": sizes.num_experts_per_token,
                "sliding_window": None,
            }
            dropped = ("attention_bias",)
        case "gemma3_text":
            config, dropped = config | _gemma(sizes), ("hidden_act", "rope_theta")
        case "deepseek_v2" | "deepseek_v3":
            config |= _deepseek(sizes)
            dropped = ("head_dim",)
    return {key: value for key, value in config.items() if key not in dropped}


def _gemma(sizes: TinySizes) -> Json:
    """Return the keys of Gemma 3: embeddings are tied, and only the last layer sees every token."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": sizes.head_dim,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * (sizes.layers - 1) + ["full_attention"],
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "tie_word_embeddings": True,
    }


def _deepseek(sizes: TinySizes) -> Json:
    """Return the keys of DeepSeek-V2 and V3: the first layer is dense, and there is one shared expert."""
    is_v3 = sizes.family == "deepseek_v3"
    return {
        "q_lora_rank": sizes.hidden // 2,
        "kv_lora_rank": _LATENT,
        "qk_nope_head_dim": sizes.head_dim,
        "qk_rope_head_dim": _ROTARY,
        "v_head_dim": sizes.head_dim,
        "n_routed_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.num_experts_per_token,
        "moe_intermediate_size": sizes.ffn_size,
        "n_shared_experts": 1,
        "first_k_dense_replace": min(1, sizes.layers - 1),
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc" if is_v3 else "greedy",
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "norm_topk_prob": is_v3,
        "routed_scaling_factor": 1.0,
    }

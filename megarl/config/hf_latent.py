"""What the config.json of a model with multi-head latent attention says (DeepSeek-V2 and V3,
arXiv:2405.04434). Torch-free.

Keys and their defaults are those of transformers' config classes."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.rope import rope_parameters

DEFAULTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
Q_LORA_RANK = 1536
"""null, not absent, means that queries have no latent."""
LATENT_NORM_EPS = 1e-6


def latent_values(config: dict[str, object]) -> dict[str, int]:
    """The keys of `DEFAULTS`, and q_lora_rank, 0 where there is none."""
    found = {key: default if config.get(key) is None else config[key] for key, default in DEFAULTS.items()}
    return found | {"q_lora_rank": config.get("q_lora_rank", Q_LORA_RANK) or 0}


def unsupported_latents(config: dict[str, object]) -> Iterator[str]:
    values = latent_values(config)
    for key, value in values.items():
        if not isinstance(value, int) or value < (key != "q_lora_rank"):
            yield (
                f"{key} ({value}): must be a positive whole "
                f"number{', or null' if key == 'q_lora_rank' else ''}."
            )
    if isinstance(values["qk_rope_head_dim"], int) and values["qk_rope_head_dim"] % 2:
        yield f"qk_rope_head_dim ({values['qk_rope_head_dim']}): must be even."
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if groups is not None and groups != heads:
        yield (
            f"num_key_value_heads ({groups}): must be num_attention_heads ({heads}); every head "
            "has keys and values of its own."
        )
    if config.get("rms_norm_eps") not in (None, LATENT_NORM_EPS):
        yield (
            f"rms_norm_eps ({config['rms_norm_eps']}): must be {LATENT_NORM_EPS:g}. transformers "
            f"normalizes the latents with {LATENT_NORM_EPS:g} "
            "whatever it is, vLLM and Megatron with this."
        )
    if config.get("rope_interleave") is False:
        yield (
            "rope_interleave (false): must be true; vLLM and Megatron have no other rotary "
            "embeddings for this model."
        )
    rope = rope_parameters(config)
    if rope["rope_type"] not in ("default", "yarn"):
        yield f"rope_type ({rope['rope_type']}): must be default or yarn for this model."
    elif refused := [key for key in ("attention_factor", "truncate") if rope.get(key) is not None]:
        yield (
            f"rope_parameters ({', '.join(refused)}): must be left out for this model; vLLM and "
            "Megatron have no word for it."
        )
    elif (rope.get("mscale") is None) != (rope.get("mscale_all_dim") is None):
        yield (
            "mscale and mscale_all_dim: must be there both or neither; with one of them "
            "transformers and vLLM differ."
        )


def latent_fields(config: dict[str, object]) -> dict[str, object]:
    """The fields of ModelShape that these keys decide; they take precedence over those of other kinds of
    attention."""
    values = latent_values(config)
    return dict(
        num_query_groups=config["num_attention_heads"],
        head_dim=values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
        q_lora_rank=values["q_lora_rank"],
        kv_lora_rank=values["kv_lora_rank"],
        qk_rope_head_dim=values["qk_rope_head_dim"],
        v_head_dim=values["v_head_dim"],
        num_nextn_predict_layers=config.get("num_nextn_predict_layers") or 0,
    )

"""Read the keys of config.json for layers that only some families have. Imports no torch.

Experts: which layers have them, their number, and the routing of tokens. Multi-head latent attention:
DeepSeek-V2 and V3 (arXiv:2405.04434). Gemma 3: windows, norms and scales.

Keys and defaults are those of transformers' config classes. A key that changes the numbers in transformers
and not here, or in vLLM and not in transformers, is an error."""

from __future__ import annotations

from megarl.config.errors import Errors
from megarl.config.hf_families import (
    Json,
    is_whole,
    rope_errors,
    rope_parameters,
    scaling,
    standard,
    value_of,
)

_QWEN: Json = dict(
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=False,
    decoder_sparse_step=1,
    mlp_only_layers=(),
)
_DEEPSEEK: Json = dict(
    num_experts=64,
    num_experts_per_tok=None,
    moe_intermediate_size=1407,
    n_shared_experts=2,
    first_k_dense_replace=0,
    n_group=None,
    topk_group=None,
    routed_scaling_factor=1.0,
    norm_topk_prob=False,
    moe_layer_freq=1,
    topk_method="greedy",
    scoring_func="softmax",
)
KEYS: dict[str, Json] = {
    "mixtral": dict(
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=14336,
        norm_topk_prob=True,
        router_jitter_noise=0.0,
    ),
    "qwen2_moe": _QWEN
    | dict(
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "qwen3_moe": _QWEN | dict(shared_expert_intermediate_size=0),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK
    | dict(
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        topk_method=None,
        scoring_func=None,
    ),
}
"""model_type -> key -> its default, None if the key has no default."""

_QWEN_NAMES = {"num_experts": ("num_experts", "num_local_experts")}  # transformers 5 writes both
_DEEPSEEK_NAMES = {"num_experts": ("n_routed_experts",)}
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "mixtral": {"num_experts": ("num_local_experts",), "moe_intermediate_size": ("intermediate_size",)},
    "qwen2_moe": _QWEN_NAMES,
    "qwen3_moe": _QWEN_NAMES,
    "deepseek_v2": _DEEPSEEK_NAMES,
    "deepseek_v3": _DEEPSEEK_NAMES,
}
"""model_type -> key of `KEYS` -> names of the key in config.json, if they differ from the key."""

_IGNORED = "transformers ignores the key for this model, vLLM would not"
_WRITTEN = "transformers assumes this value, and vLLM does so only if the key is there"
ONLY: dict[str, dict[str, tuple[tuple[object, ...], str]]] = {
    "mixtral": {"router_jitter_noise": ((0.0,), "noise on the router's input is not supported")},
    "qwen2_moe": {},
    "qwen3_moe": {
        "shared_expert_intermediate_size": ((0,), "this model has no shared experts in transformers")
    },
    "deepseek_v2": {
        "topk_method": (("greedy", "group_limited_greedy"), "transformers has no other for this model"),
        "scoring_func": (("softmax",), _IGNORED),
        "norm_topk_prob": ((False,), _IGNORED),
        "moe_layer_freq": ((1,), _IGNORED),
    },
    "deepseek_v3": {
        "topk_method": (("noaux_tc",), _WRITTEN),
        "scoring_func": (("sigmoid",), _WRITTEN),
        "norm_topk_prob": ((True,), "Megatron lets the weights that come from sigmoid scores sum to 1"),
        "moe_layer_freq": ((1,), _IGNORED),
    },
}
"""model_type -> key -> (accepted values, reason why others are refused)."""

_COUNTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "decoder_sparse_step",
)


def expert_values(model_type: str, config: Json) -> Json:
    """Return key -> value of config.json for the keys of experts, with the defaults of `KEYS` for keys that
    are absent or null."""
    values = {}
    for key, default in KEYS[model_type].items():
        names = NAMES[model_type].get(key, (key,))
        values[key] = next((config[name] for name in names if config.get(name) is not None), default)
    return values


def unsupported_experts(model_type: str, config: Json) -> Errors:
    """Yield an error per key of experts that is malformed or would be ignored."""
    values = expert_values(model_type, config)

    def said(key: str) -> str:
        """Return a key under the name that the family has for it, with its value in brackets, for errors."""
        value = values[key]
        return f"{NAMES[model_type].get(key, (key,))[0]} ({'missing' if value is None else value})"

    for key, (accepted, reason) in ONLY[model_type].items():
        if values[key] not in accepted:
            yield f"{said(key)}: must be {' or '.join(map(str, accepted))}; {reason}."
    wrong = [key for key in _COUNTS if not is_whole(values.get(key, 1), at_least=1)]
    yield from (f"{said(key)}: must be a positive whole number." for key in wrong)
    if not isinstance(values["norm_topk_prob"], bool):
        yield f"{said('norm_topk_prob')}: must be true or false."
    if wrong:
        return
    experts, per_token = values["num_experts"], values["num_experts_per_tok"]
    if per_token > experts:
        yield f"num_experts_per_tok ({per_token}): must be at most {said('num_experts')}."
    if per_token == 1 and values["norm_topk_prob"]:
        fix = "" if model_type in ("mixtral", "deepseek_v3") else " Write false."
        yield (
            "norm_topk_prob (true): with num_experts_per_tok 1 every weight is 1 and the router "
            f"learns nothing.{fix}"
        )
    yield from _unsupported_dense_layers(values, config.get("num_hidden_layers"))
    yield from _unsupported_groups(model_type, values)


def _unsupported_dense_layers(values: Json, num_layers: object) -> Errors:
    counts = ("first_k_dense_replace", "shared_expert_intermediate_size")
    wrong = [key for key in counts if not is_whole(values.get(key, 0))]
    yield from (f"{key} ({values[key]}): must be a whole number from 0 on." for key in wrong)
    layers = values.get("mlp_only_layers", ())
    if not isinstance(layers, (list, tuple)) or not all(is_whole(layer) for layer in layers):
        yield f"mlp_only_layers ({layers}): must be a list of layer numbers."
    elif (
        not wrong
        and is_whole(num_layers, at_least=1)
        and len(_dense_layers(values, num_layers)) == num_layers
    ):
        yield (
            f"num_hidden_layers ({num_layers}): none of them is a mixture of experts by "
            f"{', '.join(key for key in _DENSE if values.get(key))}."
        )


_DENSE = ("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers")


def _dense_layers(values: Json, num_layers: int) -> tuple[int, ...]:
    """Return the indices, from 0, of the layers without experts."""
    first, step, dense = (values.get(key, default) for key, default in zip(_DENSE, (0, 1, ()), strict=True))
    return tuple(
        layer for layer in range(num_layers) if layer < first or (layer + 1) % step or layer in dense
    )


def _unsupported_groups(model_type: str, values: Json) -> Errors:
    """Yield an error if the keys that restrict a token's experts to topk_group of n_group groups are not
    valid."""
    if "n_group" not in values:
        return
    if values["topk_method"] == "greedy":
        if values["n_group"] not in (None, 1):
            yield (
                f"n_group ({values['n_group']}): must be 1 with topk_method greedy; transformers "
                "then ignores the key, vLLM would not."
            )
        return
    groups, chosen = values["n_group"], values["topk_group"]
    experts, per_token, best = values["num_experts"], values["num_experts_per_tok"], group_best(model_type)
    if not is_whole(groups, at_least=1) or experts % groups or experts // groups < best:
        yield f"n_group ({groups}): must divide n_routed_experts ({experts}) into groups of at least {best}."
    elif not is_whole(chosen, at_least=1) or chosen > groups or chosen * (experts // groups) < per_token:
        yield (
            f"topk_group ({chosen}): must be at most n_group ({groups}), and its groups must have at least "
            f"num_experts_per_tok ({per_token}) of the {experts} experts."
        )


def group_best(model_type: str) -> int:
    """Return the number of a group's best experts whose scores are summed to the group's score.

    It is one in arXiv:2405.04434 and two in arXiv:2412.19437."""
    return 2 if model_type == "deepseek_v3" else 1


def expert_fields(model_type: str, config: Json) -> Json:
    """Return name -> value of the `ModelShape` fields about experts, for a family with mixtures of
    experts."""
    values = expert_values(model_type, config)
    size = values["moe_intermediate_size"]
    has_groups = values.get("n_group") is not None and values["topk_method"] != "greedy"
    has_groups = has_groups and values["topk_group"] < values["n_group"]  # else every group is chosen
    return dict(
        num_moe_experts=values["num_experts"],
        moe_ffn_hidden_size=size,
        moe_router_topk=values["num_experts_per_tok"],
        norm_topk_prob=values["norm_topk_prob"],
        dense_layers=_dense_layers(values, config["num_hidden_layers"]),
        moe_shared_expert_intermediate_size=values.get(
            "shared_expert_intermediate_size", values.get("n_shared_experts", 0) * size
        ),
        moe_shared_expert_gate=bool(values.get("shared_expert_intermediate_size")),
        moe_router_score_function=values.get("scoring_func", "softmax"),
        moe_router_enable_expert_bias=model_type == "deepseek_v3",
        moe_router_topk_scaling_factor=float(values.get("routed_scaling_factor", 1.0)),
        moe_router_num_groups=values["n_group"] if has_groups else 0,
        moe_router_group_topk=values["topk_group"] if has_groups else 0,
        moe_router_group_best=group_best(model_type) if has_groups else 0,
    )


DEFAULTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
Q_LORA_RANK = 1536
"""Default of q_lora_rank. null, in contrast to a missing key, means that queries have no latent."""
LATENT_NORM_EPS = 1e-6


def latent_values(config: Json) -> dict[str, int]:
    """Return key -> value of config.json for the sizes of multi-head latent attention, with defaults;
    q_lora_rank is 0 where queries have no latent."""
    found = {key: value_of(config, key, default) for key, default in DEFAULTS.items()}
    return found | {"q_lora_rank": config.get("q_lora_rank", Q_LORA_RANK) or 0}


def unsupported_latents(config: Json) -> Errors:
    """Yield an error per key of multi-head latent attention that is malformed or would be ignored."""
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
            f"rms_norm_eps ({config['rms_norm_eps']}): must be {LATENT_NORM_EPS:g}. transformers always "
            f"normalizes the latents with {LATENT_NORM_EPS:g}, and vLLM and Megatron with rms_norm_eps."
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
            "Megatron have no such setting."
        )
    elif (rope.get("mscale") is None) != (rope.get("mscale_all_dim") is None):
        yield (
            "mscale and mscale_all_dim: must be there both or neither; with one of them "
            "transformers and vLLM differ."
        )


def latent_fields(config: Json) -> Json:
    """Return name -> value of the `ModelShape` fields for multi-head latent attention.

    They replace the fields of other kinds of attention."""
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


_KINDS = ("sliding_attention", "full_attention")
_WINDOW, _EVERY, _SCALAR = 4096, 6, 256


def gemma_fields(config: Json) -> Json:
    """Return name -> value of the `ModelShape` fields that Gemma 3 sets in its own way: windows, rotary
    embeddings, norms and scales."""
    rope, local = _rope(config, "full_attention"), _rope(config, "sliding_attention")
    return dict(
        activation="gelu_tanh",
        zero_centered_norms=True,
        output_norms=True,
        scaled_embeddings=True,
        query_pre_attn_scalar=float(value_of(config, "query_pre_attn_scalar", _SCALAR)),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling(rope),
        local_rope_theta=float(local["rope_theta"]),
        sliding_window=value_of(config, "sliding_window", _WINDOW),
        sliding_layers=tuple(kind == "sliding_attention" for kind in _layer_types(config)),
    )


def unsupported_gemma(config: Json) -> Errors:
    """Yield an error per key of Gemma 3 that is malformed or would be ignored."""
    window = config.get("sliding_window", _WINDOW)
    scalar = value_of(config, "query_pre_attn_scalar", _SCALAR)
    types = _layer_types(config)
    if not isinstance(window, int) or window < 1:
        yield f"sliding_window ({window}): must be a positive whole number."
    if not isinstance(scalar, (int, float)) or not scalar > 0:
        yield f"query_pre_attn_scalar ({scalar}): must be above 0."
    if isinstance(config.get("num_hidden_layers"), int) and len(types) != config["num_hidden_layers"]:
        yield (
            f"layer_types ({len(types)} of them): must be one for each of the num_hidden_layers "
            f"({config['num_hidden_layers']})."
        )
    if unknown := [kind for kind in types if kind not in _KINDS]:
        yield f"layer_types ({unknown[0]}): must be one of {', '.join(_KINDS)}."
    if stray := [key for key in config.get("rope_parameters") or () if key not in _KINDS]:
        yield f"rope_parameters ({', '.join(stray)}): must be under {' or '.join(_KINDS)}."
        return
    local = _rope(config, "sliding_attention")
    if local["rope_type"] != "default":
        yield f"rope_type of sliding_attention ({local['rope_type']}): must be default."
    full = _rope(config, "full_attention")
    if full["rope_type"] == "yarn":  # Megatron has one scale of attention for all layers
        yield (
            "rope_type of full_attention (yarn): must be default, linear or llama3; YaRN scales the "
            "attention of these layers alone, which is not supported."
        )
    yield from rope_errors(full)


def _rope(config: Json, kind: str) -> Json:
    """Return the rotary parameters of Gemma 3's layers of one kind, full_attention or sliding_attention.

    Older versions write rope_theta, rope_scaling and rope_local_base_freq as separate keys."""
    rope = {"rope_type": "default"} | dict((config.get("rope_parameters") or {}).get(kind) or {})
    if kind == "full_attention":
        return standard(rope | dict(config.get("rope_scaling") or {}), config, 1e6)
    return standard(rope, {"rope_theta": config.get("rope_local_base_freq")}, 1e4)


def _layer_types(config: Json) -> list[str]:
    """Return full_attention or sliding_attention for every layer. By default every sixth layer has full
    attention."""
    every = value_of(config, "sliding_window_pattern", _EVERY)
    pattern = [_KINDS[(layer + 1) % every == 0] for layer in range(value_of(config, "num_hidden_layers", 0))]
    return value_of(config, "layer_types", pattern)

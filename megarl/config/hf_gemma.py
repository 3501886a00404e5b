"""What config.json says of a Gemma 3 text model beyond what other families have. Torch-free; defaults are
Gemma3TextConfig's."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.rope import rope_findings, scaling, standard

ONLY_GEMMA = {
    "hidden_act": (("gelu_pytorch_tanh",), "Gemma 3 names it hidden_activation"),
    "hidden_activation": (("gelu_pytorch_tanh",), "only gelu_pytorch_tanh is supported"),
    "final_logit_softcapping": ((), "capped logits are not supported"),
    "attn_logit_softcapping": ((), "capped attention is not supported"),
    "use_bidirectional_attention": ((False,), "only causal language models are supported"),
}
"""As ONLY of hf_config.py, and before it."""
_KINDS = ("sliding_attention", "full_attention")
_WINDOW, _EVERY, _SCALAR = 4096, 6, 256


def gemma_fields(config: dict[str, object]) -> dict[str, object]:
    """Fields of ModelShape."""
    rope, local = _rope(config, "full_attention"), _rope(config, "sliding_attention")
    return dict(
        activation="gelu_tanh",
        zero_centered_norms=True,
        output_norms=True,
        scaled_embeddings=True,
        query_pre_attn_scalar=float(_value(config, "query_pre_attn_scalar", _SCALAR)),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling(rope),
        local_rope_theta=float(local["rope_theta"]),
        sliding_window=_value(config, "sliding_window", _WINDOW),
        sliding_layers=tuple(kind == "sliding_attention" for kind in _layer_types(config)),
    )


def unsupported_gemma(config: dict[str, object]) -> Iterator[str]:
    window, scalar, types = (
        config.get("sliding_window", _WINDOW),
        _value(config, "query_pre_attn_scalar", _SCALAR),
        _layer_types(config),
    )
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
    yield from rope_findings(_rope(config, "full_attention"))


def _rope(config: dict[str, object], kind: str) -> dict[str, object]:
    """Older folders have rope_theta, rope_scaling and rope_local_base_freq beside each other."""
    rope = {"rope_type": "default"} | dict((config.get("rope_parameters") or {}).get(kind) or {})
    if kind == "full_attention":
        return standard(rope | dict(config.get("rope_scaling") or {}), config, 1e6)
    return standard(rope, {"rope_theta": config.get("rope_local_base_freq")}, 1e4)


def _layer_types(config: dict[str, object]) -> list[str]:
    """Of every layer. Every sixth attends to all tokens, unless the key says otherwise."""
    every = _value(config, "sliding_window_pattern", _EVERY)
    pattern = [_KINDS[(layer + 1) % every == 0] for layer in range(_value(config, "num_hidden_layers", 0))]
    return _value(config, "layer_types", pattern)


def _value(config: dict[str, object], key: str, default: object) -> object:
    return default if config.get(key) is None else config[key]

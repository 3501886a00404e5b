"""What the config.json of a mixture of experts says: which layers have experts, how many, and how tokens are
sent to them. Torch-free.

Keys and their defaults are those of transformers' config classes. A key that changes the numbers in
transformers and not here, or in vLLM and not in transformers, is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

_QWEN = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
_DEEPSEEK = {
    "num_experts": 64,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
}
KEYS: dict[str, dict[str, object]] = {
    "mixtral": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14336,
        "norm_topk_prob": True,
        "router_jitter_noise": 0.0,
    },
    "qwen2_moe": _QWEN
    | {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": _QWEN | {"shared_expert_intermediate_size": 0},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK
    | {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "topk_method": None,
        "scoring_func": None,
    },
}
"""model_type -> key -> its default; None: there is none."""

_DEEPSEEK_NAMES = {"num_experts": ("n_routed_experts",)}
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "mixtral": {"num_experts": ("num_local_experts",), "moe_intermediate_size": ("intermediate_size",)},
    "qwen2_moe": {"num_experts": ("num_experts", "num_local_experts")},
    "qwen3_moe": {
        "num_experts": ("num_experts", "num_local_experts")
    },  # transformers 5 writes the second as well
    "deepseek_v2": _DEEPSEEK_NAMES,
    "deepseek_v3": _DEEPSEEK_NAMES,
}
"""model_type -> key of `KEYS` -> what its config.json calls it, where that is not the key itself."""

_IGNORED = "transformers ignores the key for this model, vLLM would not"
_WRITTEN = "transformers takes it to be this, and vLLM does only where it is written"
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
"""model_type -> key -> (the values that it may have, why others are refused)."""

_COUNTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "decoder_sparse_step",
)


def expert_values(model_type: str, config: dict[str, object]) -> dict[str, object]:
    """The keys of `KEYS` and what they are in `config`. null is the same as absent."""
    names = NAMES[model_type]
    written = {
        key: [config[name] for name in names.get(key, (key,)) if config.get(name) is not None]
        for key in KEYS[model_type]
    }
    return {
        key: found[0] if (found := written[key]) else default for key, default in KEYS[model_type].items()
    }


def unsupported_experts(model_type: str, config: dict[str, object]) -> Iterator[str]:
    """What is wrong with the keys, or would be ignored."""
    values = expert_values(model_type, config)

    def said(key: str) -> str:
        """The key as the family calls it, and its value."""
        value = values[key]
        return f"{NAMES[model_type].get(key, (key,))[0]} ({'missing' if value is None else value})"

    for key, (accepted, reason) in ONLY[model_type].items():
        if values[key] not in accepted:
            yield f"{said(key)}: must be {' or '.join(map(str, accepted))}; {reason}."
    wrong = [key for key in _COUNTS if key in values and not _is_count(values[key], at_least=1)]
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


def _is_count(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _unsupported_dense_layers(values: dict[str, object], num_layers: object) -> Iterator[str]:
    wrong = [
        key
        for key in ("first_k_dense_replace", "shared_expert_intermediate_size")
        if key in values and not _is_count(values[key], at_least=0)
    ]
    yield from (f"{key} ({values[key]}): must be a whole number from 0 on." for key in wrong)
    layers = values.get("mlp_only_layers", ())
    if not isinstance(layers, (list, tuple)) or not all(_is_count(layer, at_least=0) for layer in layers):
        yield f"mlp_only_layers ({layers}): must be a list of layer numbers."
    elif (
        not wrong
        and _is_count(num_layers, at_least=1)
        and len(_dense_layers(values, num_layers)) == num_layers
    ):
        yield (
            f"num_hidden_layers ({num_layers}): none of them is a mixture of experts by "
            f"{', '.join(key for key in _DENSE if values.get(key))}."
        )


_DENSE = ("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers")


def _dense_layers(values: dict[str, object], num_layers: int) -> tuple[int, ...]:
    """Numbers of the layers without experts."""
    first, step, dense = (values.get(key, default) for key, default in zip(_DENSE, (0, 1, ()), strict=True))
    return tuple(
        layer for layer in range(num_layers) if layer < first or (layer + 1) % step or layer in dense
    )


def _unsupported_groups(model_type: str, values: dict[str, object]) -> Iterator[str]:
    """The limit of a token's experts to topk_group of n_group groups."""
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
    if not _is_count(groups, at_least=1) or experts % groups or experts // groups < best:
        yield f"n_group ({groups}): must divide n_routed_experts ({experts}) into groups of at least {best}."
    elif not _is_count(chosen, at_least=1) or chosen > groups or chosen * (experts // groups) < per_token:
        yield (
            f"topk_group ({chosen}): must be at most n_group ({groups}), and its groups must have "
            "at least num_experts_per_tok "
            f"({per_token}) of the {experts} experts."
        )


def group_best(model_type: str) -> int:
    """How many of a group's best experts add up to the score of the group: arXiv:2405.04434 takes the best
    one, arXiv:2412.19437 two."""
    return 2 if model_type == "deepseek_v3" else 1


def expert_fields(model_type: str, config: dict[str, object]) -> dict[str, object]:
    """The fields of ModelShape that `KEYS` decide."""
    values = expert_values(model_type, config)
    size, has_groups = (
        values["moe_intermediate_size"],
        values.get("n_group") is not None and values["topk_method"] != "greedy",
    )
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

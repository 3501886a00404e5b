"""Rotary embeddings as config.json has them, in the spellings of every version of transformers. Torch-free.

Admitted is what transformers and vLLM compute alike; `megatron/rope.py` has the formulas."""

from __future__ import annotations

from collections.abc import Iterator

# rope_type -> (keys that it needs, keys that it may have). Keys of other types change nothing.
TYPES = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
REFUSED_TYPES = {
    "dynamic": "transformers scales by the length of each sequence, vLLM by the longest possible one",
    "longrope": "two sets of frequencies, by the length of the sequence, are not supported",
    "proportional": "frequencies that differ over the heads' parts are not supported",
}
_KEYS = {key for needed, optional in TYPES.values() for key in (*needed, *optional)} | {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
}


def rope_parameters(config: dict[str, object], theta: float = 10000.0) -> dict[str, object]:
    """In the form of transformers 5: older folders have rope_theta and rope_scaling beside each other.
    `theta`: of a config.json without."""
    return standard(config.get("rope_scaling") or config.get("rope_parameters") or {}, config, theta)


def standard(parameters: dict[str, object], config: dict[str, object], theta: float) -> dict[str, object]:
    """`parameters` with the keys that may be beside them in config.json or left out."""
    rope = dict(parameters)
    rope.setdefault("rope_theta", theta if config.get("rope_theta") is None else config["rope_theta"])
    rope.setdefault("rope_type", rope.get("type", "default"))
    if "original_max_position_embeddings" in TYPES.get(str(rope["rope_type"]), ((),))[0]:
        if config.get("original_max_position_embeddings") is not None:  # transformers lets it win
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


def scaling(rope: dict[str, object]) -> dict[str, object] | None:
    """What of `rope_parameters` scales, rope_type among it; None: nothing."""
    needed, optional = TYPES[rope["rope_type"]]
    return {key: rope[key] for key in ("rope_type", *needed, *optional) if key in rope} if needed else None


def rope_findings(rope: dict[str, object]) -> Iterator[str]:
    """Why these parameters cannot be used."""
    kind = str(rope["rope_type"])
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        yield (
            f"rope_parameters ({', '.join(nested)}): different rotary embeddings per kind of "
            "layer are not supported."
        )
        return
    if kind not in TYPES:
        yield (
            f"rope_type ({kind}): {REFUSED_TYPES.get(kind, 'is not known')}; must be one of "
            f"{', '.join(TYPES)}."
        )
        return
    if rope.get("type", kind) != kind:
        yield f"type ({rope['type']}): contradicts rope_type ({kind}). Write one of them."
    if unknown := sorted(rope.keys() - _KEYS):
        yield (
            f"rope_parameters ({', '.join(unknown)}): keys that change the rotary embedding in a "
            "way that is not supported."
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        yield (
            f"partial_rotary_factor ({rope['partial_rotary_factor']}): rotary embeddings of a "
            "part of each head are not supported."
        )
    yield from _scaling_findings(kind, rope)


def _scaling_findings(kind: str, rope: dict[str, object]) -> Iterator[str]:
    needed, optional = TYPES[kind]
    if missing := [key for key in needed if not _is_number(rope.get(key))]:
        yield f"rope_type ({kind}): needs {' and '.join(missing)}."
        return
    for key in (key for key in optional if key in rope):
        if key == "truncate" and not isinstance(rope[key], bool):
            yield f"rope_type ({kind}): truncate ({rope[key]}) must be true or false."
        elif key != "truncate" and not _is_number(rope[key]):
            yield f"rope_type ({kind}): {key} ({rope[key]}) must be a positive number."
    if needed and rope["factor"] < 1:
        yield f"factor ({rope['factor']}): must be at least 1."
    elif kind == "linear" and isinstance(rope["factor"], int):
        yield (
            f"factor ({rope['factor']}): vLLM takes it as a number with a point only. Write "
            f"{float(rope['factor'])}."
        )
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        yield (
            f"high_freq_factor ({rope['high_freq_factor']}): must be above low_freq_factor "
            f"({rope['low_freq_factor']})."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0

"""What kind of value each key of a config.json has, so that all who read one may rely on it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

_MOST_LAYERS = 10_000


def _is_whole(value: object, at_least: int = 0, at_most: int = 2**31 - 1) -> bool:
    return type(value) is int and at_least <= value <= at_most  # a bool is an int to isinstance


def _is_number(value: object, above: float = 0) -> bool:
    return type(value) in (int, float) and above < value <= 1e300


def _are_tokens(value: object) -> bool:
    return all(map(_is_whole, value if isinstance(value, list) else [value]))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "must be a positive whole number": (
        _is_whole,
        """
        hidden_size intermediate_size num_attention_heads vocab_size head_dim max_position_embeddings original_max_position_embeddings
        sliding_window num_labels max_window_layers num_nextn_predict_layers""",
    ),
    "must be a whole number above 0": (lambda value: _is_whole(value, at_least=1), "sliding_window_pattern"),
    f"must be a positive whole number, at most {_MOST_LAYERS}": (
        lambda value: _is_whole(value, at_most=_MOST_LAYERS),
        "num_hidden_layers",
    ),
    "must be a number": (lambda value: _is_number(value, -1e300), "query_pre_attn_scalar"),
    "must be a positive number": (
        _is_number,
        "rms_norm_eps rope_theta rope_local_base_freq routed_scaling_factor",
    ),
    "must be true or false": (
        lambda value: isinstance(value, bool),
        "tie_word_embeddings use_sliding_window rope_interleave",
    ),
    "must be a list of names": (_are_texts, "layer_types architectures"),
    "must be an object": (lambda value: isinstance(value, dict), "rope_scaling rope_parameters id2label"),
    "must be a token id, or a list of them": (_are_tokens, "eos_token_id"),
}
"""Rule -> (whether a value is of the kind, the keys that it is for). Whether a 0 is right the rules of each
key know."""
_OF_ROPE = ("rope_theta", "original_max_position_embeddings")


def kind_findings(config: Mapping[str, object]) -> Iterator[str]:
    """One line per key of another kind. null is the same as absent."""
    for rule, (holds, keys) in KINDS.items():
        for key in keys.split():
            if config.get(key) is not None and not holds(config[key]):
                yield f"{key} ({config[key]!s:.80}): {rule}."
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        for inner in (rope, *rope.values()) if isinstance(rope, dict) else ():
            if isinstance(inner, dict):
                yield from kind_findings({key: inner.get(key) for key in _OF_ROPE})

"""Say why a value of an environment or an agent can be stored in no log and no checkpoint.

Logs are JSON and checkpoints are MessagePack, so a value must be one of both. The module imports nothing of megarl: the
processes of environments use it, too."""

from __future__ import annotations

import math

_DEEPEST = 64


def json_problem(value: object, where: str, any_integer: bool = False) -> str | None:
    """Return where a value holds something that cannot be stored, and what it is; None if it holds nothing of the kind.

    Example: json_problem([{"n": 2**70}], "messages") is "messages[0].n is an integer of 71 bits; -2^63 to 2^64 - 1
    can be stored".

    Args:
        where: name of the value.
        any_integer: whether integers may have more than 64 bits, as in JSON, but not in a checkpoint."""
    return _problem(value, where, where, _DEEPEST, any_integer)


def _problem(value: object, where: str, root: str, levels: int, any_integer: bool) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return (
            None
            if _is_text(value)
            else f"{where} has half of a surrogate pair, which is no text: {value!a:.100}"
        )
    if isinstance(value, int):
        if any_integer or -(2**63) <= value < 2**64:
            return None
        return f"{where} is an integer of {value.bit_length()} bits; -2^63 to 2^64 - 1 can be stored"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value}, which JSON cannot hold"
    if isinstance(value, dict):
        inner = [(f"{where}.{key}", item) for key, item in value.items()]
        for key in value:
            if not isinstance(key, str) or not _is_text(key):
                return f"{where} has the key {key!a:.100}; keys must be text"
    elif isinstance(value, (list, tuple)):
        inner = [(f"{where}[{at}]", item) for at, item in enumerate(value)]
    else:
        return f"{where} is {value!a:.100} ({type(value).__name__}), which JSON cannot hold"
    if inner and not levels:  # also where a value holds itself
        return f"{root} is nested deeper than {_DEEPEST} levels"
    found = (_problem(item, place, root, levels - 1, any_integer) for place, item in inner)
    return next((problem for problem in found if problem is not None), None)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

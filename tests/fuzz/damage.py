"""Damage to files: bytes that change, and JSON in which somebody has put something else."""

from __future__ import annotations

from hypothesis import strategies as st

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 99)
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["F32", "float32", "bfloat16", "nn", "x", "../x", "\x00", 2**63, 10**400, "[" * 3000]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["dtype", "shape", "parts", "data_offsets"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)
paths = st.lists(st.integers(0, 50), max_size=6)
edits = st.lists(
    st.tuples(paths, json_values, st.sampled_from(["put", "put", "drop", "add"])), min_size=1, max_size=3
)
damages = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "drop", "insert", "zero"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=3,
)


def edited(value: object, path: list[int], new: object, how: str) -> object:
    """A copy with one value, somewhere inside, replaced, left out or added."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, copy = keys[path[0] % len(keys)], value.copy()
    if len(path) > 1 or how == "put":
        copy[key] = edited(copy[key], path[1:], new, how)
    elif how == "drop":
        del copy[key]
    else:
        copy.update({"new": new}) if isinstance(copy, dict) else copy.append(new)
    return copy


def damaged(content: bytes, damage: list[tuple[str, float, bytes]]) -> bytes:
    for how, place, new in damage:
        at = int(place * len(content))
        changed = {
            "flip": bytes([content[at] ^ (new[0] or 1)]) if at < len(content) else b"",
            "cut": b"",
            "drop": b"",
            "insert": new + content[at : at + 1],
            "zero": bytes(len(new)),
        }[how]
        content = (
            content[:at]
            + changed
            + (b"" if how == "cut" else content[at + (len(new) if how in ("drop", "zero") else 1) :])
        )
    return content

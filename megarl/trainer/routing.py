"""Choose an engine for each group of samples, by the load of the engines.

The driver's measure of load is the number of unfinished samples, which it knows without asking. The free memory
of a KV cache says nothing about requests that wait for their first step, and would cost a message to each
engine's process at a time when the engines wait for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def route(num_groups: int, loads: Sequence[float | None], load_of_group: float = 1.0) -> list[int]:
    """Return the index of the engine of each group. An engine gets a contiguous block of groups, so that
    neighbours share an engine.

    Loads are made as even as whole groups allow. With equal loads engine i gets the groups
    i * num_groups // n to (i + 1) * num_groups // n - 1, as in the rollout role's `generate`.

    Example: engine 1 is gone, engine 2 is as busy as with two groups: route(6, [0, None, 2]) is
    [0, 0, 0, 0, 2, 2].

    Args:
        loads: load of each engine, such as its unfinished samples; None for an engine that is gone.
        load_of_group: load that a group adds, in the same unit.
    Raises: ValueError if there is no engine."""
    present = {engine: Fraction(load) for engine, load in enumerate(loads) if load is not None}
    if not present:
        raise ValueError(f"loads ({list(loads)}) must have at least one engine that is not gone.")
    lowest = min(present.values())
    # Load of each engine beyond the lowest, in groups. Fractions, so that equal loads split exactly.
    ahead = {engine: (load - lowest) / Fraction(load_of_group) for engine, load in present.items()}
    while True:
        level = Fraction(num_groups + sum(ahead.values())) / len(ahead)
        if not (above := [engine for engine, load in ahead.items() if load > level]):
            break
        for engine in above:  # the others do not reach its load, so it gets no group
            del ahead[engine]
    routed: list[int] = []
    filled = Fraction(0)
    for engine, load in ahead.items():
        filled += level - load
        routed += [engine] * (int(filled) - len(routed))
    return routed

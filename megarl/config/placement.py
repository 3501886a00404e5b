"""Rank lists of the placement flags: 0-3,6."""

from __future__ import annotations

import re


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Ranks in ascending order. Example: parse_ranks("0-2,6", 8) == (0, 1, 2, 6).

    Raises: ValueError for what is no such list, for a rank that is named twice or out of order, and for one outside the world.
    """
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ValueError(f"ranks ({text}): must be ranks and ranges of ranks, like 0-3 or 0,2.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or ranks and first <= ranks[-1]:
            raise ValueError(f"ranks ({text}): must ascend, each rank once.")
        if last >= world_size:
            raise ValueError(f"ranks ({text}): must be below the number of ranks ({world_size}), so at most {world_size - 1}.")
        ranks += range(first, last + 1)
    return tuple(ranks)

"""What a path that is wrong was probably meant to be."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from pathlib import Path

_MOST_LOOKED_AT = 1000


def nearest(path: Path, fits: Callable[[Path], bool]) -> Path | None:
    """Of what is in the same folder and fits, the one whose name is most like it; None if nothing fits."""
    try:
        beside = list(itertools.islice(path.parent.iterdir(), _MOST_LOOKED_AT))
        found = sorted(one for one in beside if one != path and fits(one))
    except OSError:
        return None
    return max(
        found, key=lambda one: difflib.SequenceMatcher(None, one.name, path.name).ratio(), default=None
    )


def try_path(path: Path, fits: Callable[[Path], bool], otherwise: str) -> str:
    """' Try data/train.jsonl.', or what else to do."""
    found = nearest(path, fits)
    return f" Try {found}." if found is not None else f" {otherwise}"

"""Let held-out answers run in a stream of training requests, under ids that no training sample has.

A held-out row is its own visit, so its ids may be those of a training prompt. In the stream they are negative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.workers.store import RolloutSample


def is_held_out(group: int) -> bool:
    """Return whether a group of a stream is a held-out row."""
    return group < 0


def with_own_ids(samples: Sequence[RolloutSample]) -> list[RolloutSample]:
    """Return samples of a stream with the ids that an evaluation gives them."""
    return [replace(one, sample_id=-1 - one.sample_id, group=-1 - one.group, trained=True) for one in samples]

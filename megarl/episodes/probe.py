"""Try an environment before training starts, so that a bad one ends the job before a model is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.environments import environments, of_source
from megarl.config.schema import EpisodeConfig
from megarl.episodes.env_pool import EnvironmentPool, Reply
from megarl.episodes.episode import FIRST_ACTOR
from megarl.episodes.runner import failure_of


def probe_environments(
    config: EpisodeConfig,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    actors: Sequence[str] = (FIRST_ACTOR,),
) -> None:
    """Load each environment, and ask it for the first messages of some rows.

    Args:
        rows: flag of the data files -> some of their rows.
        actors: names of the actors that play in an episode.
    Raises: ValueError if an environment cannot be loaded, or fails for a row."""
    specs = environments(config)
    with EnvironmentPool(specs, config.env_timeout_s, config.env_episodes_per_process) as pool:
        for flag, row in ((flag, row) for flag, of_flag in rows.items() for row in of_flag):
            pool.open(row)
            (reply,) = _first(pool)
            if (failure := failure_of(reply, actors)) is not None:
                raise ValueError(
                    f"--env ({of_source(specs, row.get('data_source'))}): before training, on row "
                    f"{row.get('index', 0)} (from 0) of {flag}: {failure[1]}"
                )


def _first(pool: EnvironmentPool) -> list[Reply]:
    """Wait for the next replies, and return them. Every call gets a reply, so the wait ends."""
    while not (replies := pool.replies(timeout_s=1.0)):
        pass
    return replies

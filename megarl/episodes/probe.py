"""Try an environment before training starts, so that a bad one ends the job before a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.schema import EpisodeConfig
from megarl.episodes.env_pool import EnvironmentPool, Reply


def probe_environment(config: EpisodeConfig, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the environment, and ask it for the first messages of some rows.

    Args:
        rows: flag of the data files -> their first row.
    Raises: ValueError if the environment cannot be loaded, or fails for a row."""
    assert config.env is not None
    limits = config.env_timeout_s, config.env_episodes_per_process
    with EnvironmentPool(config.env, *limits, config.env_python) as pool:
        for flag, row in rows.items():
            pool.open(row)
            (reply,) = _first(pool)
            if reply.failure is not None:
                raise ValueError(
                    f"--env ({config.env}): before training, on row 0 (from 0) of {flag}: {reply.failure}"
                )


def _first(pool: EnvironmentPool) -> list[Reply]:
    """Wait for the next replies, and return them. Every call gets a reply, so the wait ends."""
    while not (replies := pool.replies(timeout_s=1.0)):
        pass
    return replies

"""Define the events that ranks send to the driver outside of the results of calls."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.packing import Sample

GROUPS_FINISHED = "groups_finished"
"""An engine has finished the samples of whole groups, which no call waits for. Payload: `FinishedGroups`."""

HELD_OUT_FINISHED = "held_out_finished"
"""An engine has answered held-out rows that no call waits for. Payload: `FinishedGroups`."""

ENGINE_CHANGED = "engine_changed"
"""An engine has left the engines of its role, or has joined them. Payload: `EngineChange`."""


@dataclass(frozen=True)
class EngineChange:
    """An engine has ended or hangs, or one that was started again has weights."""

    role: str
    """Name of the rollout role."""
    engine: int
    """Number of the engine, from 0."""
    is_live: bool
    reason: str = ""


@dataclass(frozen=True)
class FinishedGroups:
    """The samples of groups that an engine has finished."""

    role: str
    """Name of the rollout role."""
    samples: list[Sample]

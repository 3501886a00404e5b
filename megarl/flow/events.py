"""Define the events that ranks send to the driver outside of the results of calls."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.packing import Sample

GROUPS_FINISHED = "groups_finished"
"""An engine has finished the samples of whole groups, which no call waits for. Payload: `FinishedGroups`."""


@dataclass(frozen=True)
class FinishedGroups:
    """The samples of groups that an engine has finished."""

    role: str
    """Name of the rollout role."""
    samples: list[Sample]

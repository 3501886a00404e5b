"""Describe a group: one use of a prompt, and the driver's records of its samples.

An episode of several turns may have several samples, see `Sample.num_branches`. A group counts its episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.packing import Sample


@dataclass
class Group:
    """One use of a prompt (a visit), with those of its samples that are finished so far.

    Example: Group(visit=4, row=17, num_samples=2, version=3, samples={8: Sample(8, ...), 9: Sample(9, ...)})
    """

    visit: int
    """Number of this use of the prompt, unique in the run; see `DataCursor`."""
    row: int
    """Row of the training data."""
    num_samples: int
    """Number of episodes of the finished group."""
    version: int
    """Number of training steps that were done when the prompt was admitted."""
    engine: int | None = None
    """Index of the engine that received the prompt last; None if the rollout role chose it."""
    is_issued: bool = False
    """Whether an engine has received the prompt."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """Finished samples by sample id."""

    @property
    def num_finished(self) -> int:
        """Number of episodes that have begun to arrive. An engine reports all samples of an episode together."""
        return sum(sample.branch == 0 for sample in self.samples.values())

    @property
    def is_finished(self) -> bool:
        if len(self.samples) < self.num_samples:  # cheap, and true most of the time
            return False
        expected = sum(sample.num_branches for sample in self.samples.values() if sample.branch == 0)
        return self.num_finished == self.num_samples and len(self.samples) == expected

    def record(self) -> dict[str, Any]:
        """Return the group as values that JSON can represent, without its samples."""
        return {name: value for name, value in vars(self).items() if name not in ("is_issued", "samples")}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Group:
        """Return the group of a record, which is not issued: its engine may be gone.

        A record of an older checkpoint has the step of the group's admission."""
        version = record["version"] if "version" in record else record["step"] - 1
        return cls(record["visit"], record["row"], record["num_samples"], version, record.get("engine"))

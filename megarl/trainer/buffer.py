"""Keep the admitted prompts of an actor and their samples until they are trained on.

    buffer.admit({4: 17, 5: 3}, num_samples=2, step=3)    visits of two prompts, for training step 3
    buffer.issue()                                        {4: 17, 5: 3}: prompts not yet given to an engine
    buffer.add(samples)                                   samples as they are finished, in any order
    buffer.take(step=3)                                   the finished groups, in the order of admission

The buffer holds numbers only; the tokens are on the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megarl.failures import ExplainedError
from megarl.packing import Sample


class SampleBufferError(ExplainedError, RuntimeError):
    """Raised for a sample that the buffer does not expect, and for a group that is not finished when it is
    due."""

    read_on = "docs/debugging.md, section A step is not what it must be"


@dataclass
class Group:
    """One use of a prompt (a visit), with those of its samples that are finished so far.

    Example: Group(visit=4, row=17, num_samples=2, step=3, samples={8: Sample(8, ...), 9: Sample(9, ...)})
    """

    visit: int
    """Number of this use of the prompt, unique in the run; see `DataCursor`."""
    row: int
    """Row of the training data."""
    num_samples: int
    """Number of samples of the finished group."""
    step: int
    """Training step for which the prompt was admitted."""
    is_issued: bool = False
    """Whether an engine has received the prompt."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """Finished samples by sample id."""

    @property
    def is_finished(self) -> bool:
        return len(self.samples) == self.num_samples


class SampleBuffer:
    """Buffer of admitted prompts: every prompt is trained on once or is still in the buffer.

    Args:
        staleness: number of steps by which a group may be later than the step it was admitted for. 0 is
            synchronous training: a step trains on every group that was admitted for this step.
    """

    def __init__(self, staleness: int = 0) -> None:
        self.staleness = staleness
        self._groups: dict[int, Group] = {}

    def __len__(self) -> int:
        """Return the number of groups in the buffer."""
        return len(self._groups)

    def admit(self, visits: Mapping[int, int], num_samples: int | Mapping[int, int], step: int) -> None:
        """Add prompts that are to be sampled, or raise SampleBufferError for a visit that is already in the
        buffer.

        Args:
            visits: visit -> row of the training data.
            num_samples: samples of each prompt, or visit -> samples where groups differ in size.
            step: the training step for which the prompts are admitted.
        Raises: SampleBufferError for a visit that is already in the buffer."""
        if known := sorted(visits.keys() & self._groups.keys()):
            raise SampleBufferError(f"visit {known[0]} is admitted a second time")
        for visit, row in visits.items():
            size = num_samples if isinstance(num_samples, int) else num_samples[visit]
            self._groups[visit] = Group(visit, row, size, step)

    def issue(self) -> dict[int, int]:
        """Return the prompts that no engine has received yet, and mark them as issued.

        Returns: number of the visit (one use of a prompt in the run) -> index of the prompt's data row."""
        waiting = [group for group in self._groups.values() if not group.is_issued]
        for group in waiting:
            group.is_issued = True
        return {group.visit: group.row for group in waiting}

    def add(self, samples: Iterable[Sample]) -> None:
        """Add finished samples to their groups, or raise SampleBufferError for a sample that no group waits
        for.

        Raises: SampleBufferError for a duplicate sample, and for a sample of a group that was not issued or is
        finished."""
        for sample in samples:
            group = self._groups.get(sample.group)
            if group is None or not group.is_issued:
                raise SampleBufferError(
                    f"sample {sample.sample_id} belongs to no prompt that is being sampled"
                )
            if sample.sample_id in group.samples:
                raise SampleBufferError(f"sample {sample.sample_id} was sampled more than once")
            if group.is_finished:
                raise SampleBufferError(
                    f"sample {sample.sample_id} is one more than the {group.num_samples} of visit {group.visit}"
                )
            group.samples[sample.sample_id] = sample

    def take(self, step: int) -> list[Group]:
        """Remove the finished groups and return them, in the order of admission. Raises SampleBufferError if
        a group that is due at this step is unfinished.

        Raises: SampleBufferError for an unfinished group that was admitted for step `step - staleness` or
            an earlier one."""
        for group in self._groups.values():
            if not group.is_finished and group.step + self.staleness <= step:
                raise SampleBufferError(
                    f"{group.num_samples - len(group.samples)} of {group.num_samples} samples of visit "
                    f"{group.visit} are missing: groups must be complete"
                )
        finished = [group for group in self._groups.values() if group.is_finished]
        for group in finished:
            del self._groups[group.visit]
        return finished

    def snapshot(self) -> list[dict[str, int]]:
        """Return the groups that have not been trained on, without their samples, as values that JSON can
        represent."""
        return [
            {"visit": group.visit, "row": group.row, "num_samples": group.num_samples, "step": group.step}
            for group in self._groups.values()
        ]

    def restore(self, groups: Iterable[Mapping[str, int]]) -> None:
        """Replace the content by the groups of `snapshot`, which are sampled again.

        A sample's draws depend only on its visit and index, so the sample gets the same tokens as before."""
        self._groups = {g["visit"]: Group(g["visit"], g["row"], g["num_samples"], g["step"]) for g in groups}

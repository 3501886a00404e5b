"""Keep the admitted prompts of an actor and their samples until they are trained on.

    buffer = SampleBuffer(num_prompts=2, staleness=1)
    buffer.num_to_admit(version=0, last_step=9)           4: the prompts of two steps
    buffer.admit({4: 17, 5: 3, 6: 8, 7: 1}, num_samples=2, version=0)
    buffer.issue(engines=[0, 0, 1, 1])                    {4: 17, 5: 3, 6: 8, 7: 1}: give these to the engines
    buffer.add(samples)                                   samples as they are finished, in any order
    buffer.is_ready(step=1)                               True once two of the groups are finished
    buffer.take(step=1)                                   two finished groups, in the order of admission

A *version* is the number of training steps done: step s trains weights of version s - 1. A group admitted at
version a has tokens of version a or later, and is trained on at step a + staleness + 1 at the latest. So no
token is older than `staleness` versions when it is trained on. Two rules keep this bound:
1. A group holds one of (staleness + 1) * num_prompts slots from its admission until a step takes it.
2. A step waits until the groups that it leaves can still be trained on in time, num_prompts in each later step.

The buffer holds numbers only; the tokens are on the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from megarl.failures import ExplainedError
from megarl.packing import Sample
from megarl.trainer.groups import Group
from megarl.trainer.routing import route


class SampleBufferError(ExplainedError, RuntimeError):
    """Raised for a sample that the buffer does not expect, and for a step whose groups are not there."""

    read_on = "docs/debugging.md, section A step is not what it must be"


class SampleBuffer:
    """Buffer of admitted prompts: every prompt is trained on once or is still in the buffer.

    Args:
        num_prompts: number of groups of a training step.
        staleness: largest age, in versions, of a token that is trained on. 0 is synchronous training: a step
            trains on all groups of the buffer, whose number need not be `num_prompts`.
        in_order: whether each step takes the oldest groups. Otherwise a finished group may overtake one that
            was admitted earlier, as far as `staleness` allows.
    """

    def __init__(self, num_prompts: int, staleness: int = 0, in_order: bool = False) -> None:
        self.num_prompts, self.staleness, self.in_order = num_prompts, staleness, in_order
        self._groups: dict[int, Group] = {}
        """Groups by visit, in the order of admission."""
        self._finished: set[int] = set()
        self.lost_engines: set[int] = set()
        """Engines that are gone."""
        self.pinned_engines: set[int] = set()
        """Engines that keep older weights for an evaluation. A group that is admitted now must not have their
        tokens, which may become too old."""
        self.replayed: Mapping[int, Sequence[int]] = {}
        """Training step -> visits that it takes, of the run that --replay repeats."""

    def __len__(self) -> int:
        """Return the number of groups in the buffer."""
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        """All groups in the buffer, in the order of admission."""
        return list(self._groups.values())

    @property
    def finished(self) -> list[Group]:
        """The groups whose samples are all there, in the order of admission."""
        return [group for group in self._groups.values() if group.visit in self._finished]

    @property
    def closed_engines(self) -> set[int]:
        """Engines that get no groups."""
        return self.lost_engines | self.pinned_engines

    def num_to_admit(self, version: int, last_step: int) -> int:
        """Return the number of prompts to admit at this version: one for each free slot that a step up to
        `last_step` needs.

        This is (version + staleness + 1) * num_prompts minus the groups admitted in the run, if every step so
        far took `num_prompts` groups."""
        num_steps = min(self.staleness + 1, last_step - version)
        return max(0, num_steps * self.num_prompts - len(self))

    def admit(self, visits: Mapping[int, int], num_samples: int | Mapping[int, int], version: int) -> None:
        """Add prompts that are to be sampled.

        Args:
            visits: visit -> row of the training data.
            num_samples: episodes of each prompt, or visit -> episodes where groups differ in size.
            version: number of training steps done.
        Raises: SampleBufferError for a visit that is already in the buffer, and for more prompts than there
            are free slots if `staleness` is not 0."""
        if known := sorted(visits.keys() & self._groups.keys()):
            raise SampleBufferError(f"visit {known[0]} is admitted a second time")
        slots = (self.staleness + 1) * self.num_prompts
        if self.staleness and len(self) + len(visits) > slots:
            raise SampleBufferError(
                f"{len(visits)} prompts are admitted at version {version}, but {max(0, slots - len(self))} of "
                f"the {slots} slots are free: staleness ({self.staleness}) + 1 steps of {self.num_prompts} prompts"
            )
        assert all(group.version <= version for group in self._groups.values()), "versions count up"
        for visit, row in visits.items():
            size = num_samples if isinstance(num_samples, int) else num_samples[visit]
            self._groups[visit] = Group(visit, row, size, version)

    def waiting(self) -> list[Group]:
        """Return the groups that no engine samples: new and restored ones, and those of a lost engine."""
        return [group for group in self._groups.values() if not group.is_issued]

    def issue(self, engines: Sequence[int] | None = None) -> dict[int, int]:
        """Mark the groups of `waiting` as issued. Returns their visit -> row, in the order of admission.

        Args:
            engines: engine of each of these groups; None if the rollout role spreads them itself."""
        waiting = self.waiting()
        chosen = [None] * len(waiting) if engines is None else engines
        for group, engine in zip(waiting, chosen, strict=True):
            group.is_issued, group.engine = True, engine
        return {group.visit: group.row for group in waiting}

    def engines(self, num_engines: int) -> list[int]:
        """Return the engine for each group of `waiting`: the one that it had, or one with few unfinished
        samples. Groups of new prompts that come together form contiguous blocks.

        Args:
            num_engines: engines are numbered from 0."""
        live = {*range(num_engines)} - self.closed_engines
        unfinished: Counter[int | None] = Counter()
        for group in self._groups.values():
            unfinished[group.engine] += group.num_samples - group.num_finished
        loads = [unfinished[engine] if engine in live else None for engine in range(num_engines)]
        waiting = self.waiting()
        sizes = [group.num_samples for group in waiting if group.engine not in live]
        routed = iter(route(len(sizes), loads, max(sizes, default=1)))
        engines = (group.engine for group in waiting)
        return [next(routed) if engine is None or engine not in live else engine for engine in engines]

    def lose_engine(self, engine: int) -> list[Group]:
        """Let the unfinished groups of an engine wait for another engine, and return them. It gets no groups
        while it is in `closed_engines`.

        They keep their finished samples; only the missing ones are to be sampled."""
        self.lost_engines.add(engine)
        self.pinned_engines.discard(engine)
        lost = [g for g in self._groups.values() if g.is_issued and g.engine == engine and not g.is_finished]
        for group in lost:
            group.is_issued, group.engine = False, None
        return lost

    def add(self, samples: Iterable[Sample]) -> None:
        """Add finished samples to their groups.

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
            is_full = len(group.samples) >= group.num_samples and group.num_finished == group.num_samples
            if group.is_finished or is_full and sample.branch == 0:
                raise SampleBufferError(
                    f"sample {sample.sample_id} is one more than the {group.num_samples} of visit {group.visit}"
                )
            group.samples[sample.sample_id] = sample
            if group.is_finished:
                self._finished.add(group.visit)

    def is_ready(self, step: int) -> bool:
        """Return whether `take(step)` would return the groups of this step.

        Raises: SampleBufferError if the step cannot become ready; see `take`."""
        # Two cheap tests come first, because this is called for each group that an engine finishes.
        if len(self._finished) < min(self._size_of_step, len(self)):
            return False
        in_last_step = takewhile(lambda group: self._last_step(group) <= step, self._groups.values())
        if not all(group.visit in self._finished for group in in_last_step):
            return False
        return self._chosen(step) is not None

    def due(self, step: int) -> list[Group]:
        """Return the unfinished groups that a step waits for. A limit on the tokens of a step must not hold
        them up."""
        if self.is_ready(step):
            return []
        return [g for g in self._candidates(step)[: self._size_of_step] if not g.is_finished]

    def take(self, step: int) -> list[Group]:
        """Remove the groups that this step trains on, and return them in the order of admission.

        Raises: SampleBufferError if the step must wait for an unfinished group, if fewer groups were admitted
            than the step needs, and if the groups do not fit into the steps that the staleness leaves them:
            after a resume with a smaller --staleness or --num-prompts, or after steps without rollouts."""
        chosen = self._chosen(step)
        if chosen is None:
            group = self.due(step)[0]
            raise SampleBufferError(
                f"{group.num_samples - group.num_finished} of {group.num_samples} samples of visit "
                f"{group.visit} are missing: groups must be complete"
            )
        for group in chosen:
            del self._groups[group.visit]
            self._finished.remove(group.visit)
        return chosen

    @property
    def _size_of_step(self) -> int:
        return self.num_prompts if self.staleness else len(self)

    def _candidates(self, step: int) -> list[Group]:
        """Return the groups from which a step may choose, in the order of admission."""
        if step not in self.replayed:
            return self.groups[: self._size_of_step] if self.in_order else self.groups
        visits = self.replayed[step]
        if missing := [visit for visit in visits if visit not in self._groups]:
            raise SampleBufferError(
                f"step {step} of the replayed run took visit {missing[0]}: not admitted here"
            )
        return [self._groups[visit] for visit in visits]

    def _chosen(self, step: int) -> list[Group] | None:
        """Return the groups that a step takes, or None if it waits for an unfinished one."""
        size = self._size_of_step
        if len(self) < size:
            raise SampleBufferError(
                f"step {step} needs {size} prompts, but {len(self)} are admitted: num_to_admit says how many"
            )
        if late := self._first_late(self.groups, step):  # also if enough groups are finished
            raise SampleBufferError(
                f"visit {late.visit} was admitted at version {late.version}. With staleness {self.staleness} "
                f"its last step is {self._last_step(late)}, and step {step} comes too late for it. Resume with "
                "the --staleness and --num-prompts of the checkpoint. In a loop of your own call rollout() and "
                "update() in every step"
            )
        chosen = [group for group in self._candidates(step) if group.is_finished][:size]
        if len(chosen) < size:
            return None
        taken = {group.visit for group in chosen}
        left = [group for group in self.groups if group.visit not in taken]
        return None if self._first_late(left, step + 1) else chosen

    def _last_step(self, group: Group) -> int:
        """Return the last step at which a group can be trained on: its weights are `staleness` versions newer
        than those at the group's admission."""
        return group.version + self.staleness + 1

    def _first_late(self, groups: Sequence[Group], step: int) -> Group | None:
        """Return the first group that comes too late if each step from `step` on trains on the oldest groups
        that are left; None if all are in time."""
        size = self._size_of_step
        late = (g for place, g in enumerate(groups) if step + place // size > self._last_step(g))
        return next(late, None)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the groups that have not been trained on, without their samples, as values that JSON can
        represent."""
        return [group.record() for group in self._groups.values()]

    def restore(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Replace the content by the groups of `snapshot`. All of them wait for an engine again; their
        `engine` is the one that they had.

        The engines have the samples, finished or not, and report them again. A sample whose tokens are lost is
        sampled again by the same draws, which depend only on its visit and index."""
        restored = [Group.of_record(record) for record in groups]
        self._groups = {group.visit: group for group in restored}
        self._finished = set()

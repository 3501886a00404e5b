"""Let an engine answer held-out rows beside its training samples, while other engines get new weights.

A *pinned* engine keeps its weights: its rank takes part in the syncs for the others' sake only. Unfinished training samples go on with these weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from megarl.flow.events import HELD_OUT_FINISHED, FinishedGroups
from megarl.packing import Sample
from megarl.workers.leaving_engine import LeavingEngine
from megarl.workers.answer import Answer
from megarl.workers.store import RolloutBlock, RolloutSample


def held_out(answers: Sequence[Answer], greedy: bool) -> list[Answer]:
    """Return answers to held-out rows with the ids that they have in a stream."""
    return [
        replace(one, sample_id=-1 - one.sample_id, group=-1 - one.group, greedy=greedy) for one in answers
    ]


class PinnedEngine(LeavingEngine):
    """The part of the rollout role that evaluates one version of the weights while training goes on."""

    def set_pinned(self, is_pinned: bool) -> None:
        """Let the engine keep its weights from now on, or let the next sync give it new ones."""
        if self.engine is not None:
            self.engine.is_pinned = is_pinned and not self.has_left  # one that is started again needs weights

    @property
    def is_pinned(self) -> bool:
        return self.engine is not None and self.engine.is_pinned

    def answer_beside(
        self,
        answers: Sequence[Answer],
        greedy: bool,
        recorded: AbstractContextManager[None],
        **how: float,
    ) -> None:
        """Queue answers to held-out rows, which are reported by events.

        Args:
            recorded: context in which the engine receives the requests.
            how: how the samples are drawn; greedy answers differ in the temperature."""
        self.stream.report_held_out = self._report_held_out
        with recorded:
            self.stream.add(held_out(answers, greedy), **how)

    def _report_held_out(self, finished: list[RolloutSample]) -> None:
        self.store.source("eval" + self.suffix).add(RolloutBlock(finished))
        if records := self._records(finished):
            self.context.emit(HELD_OUT_FINISHED, FinishedGroups(self.name, records))

    def _records(self, made: Sequence[RolloutSample]) -> list[Sample]:
        """Return the driver's records of samples, on the first rank of the engine only."""
        raise NotImplementedError

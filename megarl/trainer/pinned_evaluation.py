"""Evaluate one version of the weights on engines that keep it, while training goes on with the others.

    pinned.begin(step, record, note)    --eval-engines of each actor's engines answer the held-out rows
    pinned.advance()                    the next part, if what it waits for is there
    pinned.finish()                     wait for the rest
    pinned.synced("rollout")            engines that are released have got new weights

A pinned engine gets no prompts to train on until then: its tokens are older than a group that is admitted now may
have. Groups that it has go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megarl.config.mesh import MeshSpec
from megarl.flow import Reward, Rollout
from megarl.flow.events import FinishedGroups
from megarl.futures import Future
from megarl.packing import Sample
from megarl.runtime.executor import Executor
from megarl.trainer.evaluation import Answering, Evaluated, Steps, evaluate_actors
from megarl.trainer.group_future import GroupFuture
from megarl.trainer.routing import route
from megarl.trainer.state import TrainState


class _EnginesLost(Exception):
    """Raised if no engine is left that has the version of the evaluation."""


class _Answers(GroupFuture):
    """The future of the answers to held-out rows, which engines report by events: all but those of lost engines."""

    answers: Callable[[], list[Sample]]
    """Returns the answers that are there."""

    def result(self) -> list[Any]:
        super().result()
        return [self.answers()]


class PinnedEvaluation:
    """At most one evaluation that goes on beside training.

    Args:
        meshes: role -> its mesh.
        take_events: takes the events of ranks.
        num_reported: returns how many samples engines have reported so far."""

    def __init__(
        self,
        executor: Executor,
        meshes: Mapping[str, MeshSpec],
        state: TrainState,
        take_events: Callable[[], None],
        num_reported: Callable[[], int],
    ) -> None:
        self._executor, self._meshes, self._state = executor, meshes, state
        self._take_events, self._num_reported = take_events, num_reported
        self._engines: dict[str, list[int]] = {}  # rollout role -> its engines that were pinned
        self._answers: dict[str, dict[int, list[Sample]]] = {}  # rollout role -> row -> answers
        self._steps: Steps[Evaluated] | None = None
        self._record: Callable[..., None] = lambda evaluated: None
        self._note: Callable[[str], None] = lambda text: None
        self._name = ""
        self.pending: Future[Any] | None = None
        """What the evaluation waits for; None if there is none."""

    def begin(self, step: int, record: Callable[..., None], note: Callable[[str], None]) -> bool:
        """Begin to evaluate the weights of a step. Returns False, and does nothing, if --eval-engines asks for
        none, or if no engine of an actor would be left to train with.

        Args:
            record: is called with the metrics and the answers, see `Evaluated`, when they are there.
            note: shows a line to the user."""
        self._take_events()  # an engine may have left
        count, chosen = self._state.first.config.streaming.eval_engines, {}
        for suffix, actor in self._state.actors.items():
            role = f"rollout{suffix}"
            open_ones = [e for e in range(self._meshes[role].dp) if e not in actor.buffer.closed_engines]
            chosen[role] = open_ones[max(1, len(open_ones) - count) :]
        if not all(chosen.values()):
            return False
        self._engines, self._record, self._note, self._name = chosen, record, note, f"step {step}"
        for role, engines in chosen.items():
            self._state.actor_of(role).buffer.pinned_engines |= {*engines}
            self._rollout(role).set_pinned(True)
        self._steps = evaluate_actors(self._state, self._answering)
        self._go_on(None)
        return True

    def advance(self) -> None:
        """Go on as far as possible without waiting.

        Raises: RewardsFailed if too many rewards have failed."""
        while self.pending is not None and self.pending.done():
            self._go_on(self.pending.result())

    def finish(self) -> None:
        """Wait until the evaluation is over, and record it. Raises as `advance`."""
        while self.pending is not None:
            self._go_on(self.pending.result())

    def synced(self, rollout: str) -> None:
        """Let engines that are released have prompts again, as a sync that follows the release is called."""
        kept = self._engines.get(rollout, ()) if self.pending is not None else ()
        self._state.actor_of(rollout).buffer.pinned_engines &= {*kept}

    def add(self, answered: FinishedGroups) -> None:
        """Take answers that an engine has reported."""
        for sample in answered.samples:
            self._answers[answered.role].setdefault(sample.group, []).append(sample)

    def _go_on(self, value: list[Any] | None) -> None:
        assert self._steps is not None
        try:
            self.pending = self._steps.send(value)
        except _EnginesLost:
            self._release()
            self._note(f"the evaluation of {self._name} is given up: the engines with its weights have left")
        except StopIteration as end:
            self._release()
            self._record(*end.value)

    def _release(self) -> None:
        self.pending = self._steps = None
        for role in self._engines:
            self._rollout(role).set_pinned(False)

    def _ranks(self, role: str) -> list[int]:
        mesh = self._meshes[role]
        return [
            rank
            for engine in self._engines[role]
            for rank in mesh.ranks[engine * mesh.tp : (engine + 1) * mesh.tp]
        ]

    def _rollout(self, role: str) -> Rollout:
        return Rollout(self._executor, role).on(self._ranks(role))

    def _answering(self, suffix: str) -> Answering:
        role = f"rollout{suffix}"
        reward = Reward(self._executor, f"reward{suffix}").on(self._ranks(role))
        return Answering(partial(self._ask, role), reward, partial(self._route, role))

    def _route(self, role: str, count: int) -> list[int]:
        self._take_events()
        # an engine that was lost is no longer pinned, and comes back with newer weights
        left = {*self._engines[role]} & self._state.actor_of(role).buffer.pinned_engines
        if not left:
            raise _EnginesLost
        return route(count, [0 if engine in left else None for engine in range(self._meshes[role].dp)])

    def _ask(
        self, role: str, rows: Mapping[int, int], greedy: bool, engines: Sequence[int] | None
    ) -> Future[list[Sample]]:
        assert engines is not None
        answers: dict[int, list[Sample]] = {}
        self._answers[role] = answers
        engine_of, buffer = dict(zip(rows, engines, strict=True)), self._state.actor_of(role).buffer

        def is_ready() -> bool:
            self._take_events()
            pinned = buffer.pinned_engines
            return all(row in answers or engine not in pinned for row, engine in engine_of.items())

        call = self._rollout(role).generate("eval", rows, greedy=greedy, engines=engines, wait=False)
        future = _Answers(self._executor, call, is_ready, self._num_reported, self._ranks(role))
        future.answers = lambda: [sample for row in rows for sample in answers.get(row, ())]
        return future

"""An evaluation whose engines leave meanwhile is answered by those that are left.

pytest tests/trainer/test_evaluation_engines.py"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.flow import Reward, Rollout
from megarl.packing import Sample
from megarl.trainer.evaluation import Answering, _generate, run
from megarl.trainer.routing import route


class Ended:
    def __init__(self, value: list[list[Sample]]) -> None:
        self.value = value

    def result(self) -> list[list[Sample]]:
        return self.value


class Engines:
    """Engines of one role, which a handle of the flow calls. One of them leaves in each of the first calls."""

    def __init__(self, number: int, leaving: Sequence[int]) -> None:
        self.number, self.leaving, self.gone = number, [*leaving], set()
        self.calls: list[list[int] | None] = []

    def call(self, role: str, method: str, purpose, visits, greedy, engines) -> Ended:
        assert (role, method, purpose, greedy) == ("rollout", "generate", "eval", True)
        self.calls.append(engines)
        if self.leaving:
            self.gone.add(self.leaving.pop(0))
        given = route(len(visits), [0] * self.number) if engines is None else engines
        samples = [[] for _ in range(self.number)]
        for (visit, _), engine in zip(visits.items(), given, strict=True):
            if engine not in self.gone:
                samples[engine].append(Sample(visit, 3, 2, group=visit))
        return Ended(samples)

    def route_rows(self, count: int) -> list[int] | None:
        loads = [None if engine in self.gone else 0 for engine in range(self.number)]
        return route(count, loads) if self.gone else None


def answering(engines: Engines) -> Answering:
    return Answering.by_all(Rollout(engines, "rollout"), Reward(engines, "reward"), engines.route_rows)


def test_all_rows_are_answered_again_by_the_engines_that_are_left():
    engines = Engines(3, leaving=[1, 0])
    rows = {row: "source" for row in (5, 6, 7, 8)}
    answered = run(_generate(answering(engines), rows, True))
    assert [sample.sample_id for of_rank in answered for sample in of_rank] == [5, 6, 7, 8]
    assert engines.calls == [None, [0, 0, 2, 2], [2, 2, 2, 2]]


def test_one_call_is_enough_where_all_engines_stay():
    engines = Engines(2, leaving=[])
    run(_generate(answering(engines), {1: "source"}, True))
    assert engines.calls == [None]

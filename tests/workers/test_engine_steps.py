"""Ranks that step an engine together between calls take the same steps, whatever each of them knows.

    pytest tests/workers/test_engine_steps.py

run_engine_steps.py is the same on two gloo ranks."""

from __future__ import annotations

from pathlib import Path

from megarl.runtime.abort import Aborted
from megarl.workers.engine_steps import EngineSteps
from tests.launch import run_ranks


class CountedEngine:
    """An engine with so many steps to do."""

    def __init__(self, num_steps: int, is_held: bool = False, aborted_at: int | None = None) -> None:
        self.left, self.held, self.aborted_at, self.num_steps = num_steps, is_held, aborted_at, 0

    def has_unfinished(self) -> bool:
        return self.left > 0

    def is_held(self) -> bool:
        return self.held

    def step(self) -> None:
        if self.num_steps == self.aborted_at:
            raise Aborted
        self.num_steps, self.left = self.num_steps + 1, self.left - 1


def hook_of(*engines: CountedEngine) -> EngineSteps:
    hook = EngineSteps()
    for engine in engines:
        hook.add(engine)
    return hook


def run(hook: EngineSteps) -> int:
    """Step until the hook has nothing to do, and return the number of steps."""
    count = 0
    while not hook.agree(False):
        count += 1
        if not hook.step():
            break
    return count


def test_a_failure_of_a_step_is_one_of_sampling():
    assert (hook_of().role, hook_of().method) == ("rollout", "generate")


def test_engines_step_until_all_are_finished():
    short, long = CountedEngine(2), CountedEngine(5)
    assert run(hook_of(short, long)) == 5 and (short.num_steps, long.num_steps) == (2, 5)
    assert run(hook_of()) == 0


def test_a_command_of_the_driver_comes_first():
    engine = CountedEngine(2)
    assert hook_of(engine).agree(True) and engine.num_steps == 0


def test_an_engine_that_is_held_stands_still_beside_one_that_goes_on():
    held, free = CountedEngine(2, is_held=True), CountedEngine(3)
    hook = hook_of(held, free)
    assert run(hook) == 3 and held.num_steps == 0  # then there is nothing to do, and the rank waits
    held.held = False
    assert run(hook) == 2


def test_after_an_abort_no_engine_steps_again():
    engine = CountedEngine(5, aborted_at=2)
    hook = hook_of(engine)
    assert run(hook) == 3 and engine.num_steps == 2
    assert hook.agree(False) and engine.has_unfinished()


def test_two_ranks_take_the_same_steps(tmp_path):
    script = Path(__file__).with_name("run_engine_steps.py")
    run_ranks(2, lambda rank: ["-P", script, tmp_path, rank], timeout=120)
    told = [(tmp_path / f"report_{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1] != ""

"""The contract of an executor: what anything above it relies on, tested for whatever an executor declares.

A set-up hosts `build_roles` on its ranks and hands the executor to `run`, which returns what each check
found. The roles are "both" on every rank, "left" on the first and "right" on the last; these may be the same
rank.

    run(executor)                     all checks that leave the executor usable, then a shutdown
    run_failure(executor, name)       one check after which the executor is of no more use
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping

import pytest

from megarl.packing import MiniBatch, Sample
from megarl.runtime.executor import CallTimeout, Executor, RemoteError
from megarl.runtime.hosting import WorkerContext
from megarl.runtime.messages import CannotSend

LATE_S = 1.5
WAIT_S = 60.0  # for an event that must come


class Contract:
    """The role of the contract, as an interface: what its methods return."""

    def make_samples(self, count: int) -> list[Sample]: ...

    def wrong_result(self) -> dict[str, int]: ...


INTERFACES = dict.fromkeys(("both", "left", "right"), Contract)


class ContractRole:
    """A role without a model. `agree` is a collective over all ranks: the first rank's value."""

    def __init__(self, name: str, context: WorkerContext, notes: list, agree: Callable[[bool], bool]) -> None:
        self.name, self.context, self.notes, self.agree = name, context, notes, agree
        self.idle_steps, self.idle_limit, self.fails_idle = 0, 0, False

    def echo(self, *args, **kwargs):
        return [args, kwargs]

    def types(self, sample: Sample, weights: dict[int, float], batches: list[MiniBatch], flag: bool = False):
        """Names of the types that have arrived."""
        (key, value), micro = next(iter(weights.items())), batches[0].micro_batches
        return [type(x).__name__ for x in (sample, key, value, batches[0], micro, micro[0][0][0], flag)]

    def make_samples(self, count: int):
        return [Sample(i, 10 + i, 5, owners=(self.context.rank,)) for i in range(count)]

    def wrong_result(self):
        return {"one": "1"}

    def generator(self):
        return (i for i in range(3))

    def append(self, items: list):
        items.append("seen")
        return items

    def double(self, data: bytes):
        return data + data

    def note(self, i: int):
        self.notes.append([self.name, i])

    def read_notes(self):
        return self.notes

    def sleep(self, seconds: float):
        start = time.monotonic()
        time.sleep(seconds)
        return [start, time.monotonic()]

    def pid(self):
        return os.getpid()

    def update(self, bad_rank: int):
        if self.context.rank == bad_rank:
            raise ValueError(f"learning rate ({-1}) must be positive")

    def die(self, bad_rank: int):
        if self.context.rank == bad_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(WAIT_S)

    def leave(self, bad_rank: int):
        """End as native code may, or a user's function: with the exit code of success, and without a word."""
        if self.context.rank == bad_rank:
            os._exit(0)
        time.sleep(WAIT_S)

    def emit(self, count: int):
        for i in range(count):
            self.context.emit("counted", {"number": i})

    def emit_later(self, seconds: float):
        timer = threading.Timer(seconds, self.context.emit, ("late", self.context.rank))
        timer.daemon = True
        timer.start()

    def emit_generator(self):
        self.context.emit("bad", (i for i in range(3)))

    def wait_for_abort(self, seconds: float):
        self.context.emit("begun")
        for _ in range(int(seconds / 0.02)):
            self.context.abort.check()
            time.sleep(0.02)
        return "was not aborted"

    # The idle hook.

    role, method = "both", "start_idling"

    def start_idling(self, limit: int, fails: bool = False):
        self.idle_steps, self.idle_limit, self.context.idle_hook = 0, limit, self
        self.fails_idle = fails

    def stop_idling(self):
        self.context.idle_hook = None
        return self.idle_steps

    def count_idle_steps(self):
        return self.idle_steps

    def step(self) -> bool:
        if self.fails_idle:
            raise ValueError(f"{self.idle_limit} steps are too many")
        if self.idle_steps < self.idle_limit:
            self.idle_steps += 1
            time.sleep(0.001 * (1 + self.context.rank))  # ranks are not equally fast
            if self.idle_steps == self.idle_limit and self.context.rank == 0:
                self.context.emit("idled", self.idle_steps)
        return self.idle_steps < self.idle_limit


def build_roles(
    context: WorkerContext, ranks: Mapping[str, list[int]], agree: Callable[[bool], bool]
) -> dict[str, object]:
    """Return the roles of one rank."""
    notes: list = []
    return {
        name: ContractRole(name, context, notes, agree)
        for name, of_role in ranks.items()
        if context.rank in of_role
    }


def ranks_of(world_size: int) -> dict[str, list[int]]:
    """Return the placement of the contract's roles."""
    return {"both": list(range(world_size)), "left": [0], "right": [world_size - 1]}


def run(executor: Executor) -> dict[str, str | None]:
    """Return what went wrong in each check, or None. The executor is shut down at the end."""
    found = {check.__name__: _outcome(check, executor) for check in CHECKS}
    found["shutdown"] = _outcome(lambda executor: executor.shutdown(), executor)
    return found


def run_failure(executor: Executor, name: str) -> str | None:
    """Return what went wrong in one check of FAILURES, or None."""
    return _outcome(FAILURES[name], executor)


def _outcome(check: Callable[[Executor], None], executor: Executor) -> str | None:
    try:
        check(executor)
    except (Exception, pytest.fail.Exception):  # the boundary of a job: reported where pytest runs
        return traceback.format_exc()
    return None


def values_and_keywords(executor: Executor) -> None:
    items, size = [1, 2], len(executor.ranks["both"])
    echoed = executor.call("both", "echo", 1, "two", None, key=[3.5])
    assert echoed.result() == [[[1, "two", None], {"key": [3.5]}]] * size
    assert executor.call("both", "append", items).result() == [[1, 2, "seen"]] * size
    assert items == [1, 2], "arguments are shared with the rank"
    assert executor.call("both", "echo", {7: float("inf")}).first() == [[{7: float("inf")}], {}]


def arguments_have_their_declared_types(executor: Executor) -> None:
    batch = MiniBatch((((1, 2),), ((3,),)), num_tokens=6, num_sequences=3)
    found = executor.call("left", "types", Sample(1, 2, 1), {3: 1}, [batch], flag=True).first()
    assert found == ["Sample", "int", "float", "MiniBatch", "tuple", "int", "bool"]


def results_have_the_types_of_the_interface(executor: Executor) -> None:
    ranks = executor.ranks["both"]
    expected = [[Sample(0, 10, 5, (rank,)), Sample(1, 11, 5, (rank,))] for rank in ranks]
    assert executor.call("both", "make_samples", 2).result() == expected


def what_cannot_be_sent_is_refused_before_the_call(executor: Executor) -> None:
    before = executor.num_calls
    with pytest.raises(
        CannotSend, match=r"^\[left\] echo: argument 2 \(generator\) cannot be sent: generator is no plain"
    ):
        executor.call("left", "echo", 1, (i for i in range(3)))
    with pytest.raises(CannotSend, match=r"^\[left\] echo: argument key \(dict\) cannot be sent: .*Thread"):
        executor.call("left", "echo", key={"a": [threading.current_thread()]})
    assert executor.num_calls == before
    assert executor.call("left", "echo").result() == [[[], {}]]


def roles_and_ranks_are_checked(executor: Executor) -> None:
    with pytest.raises(
        ValueError, match=r"role \('nobody'\) is not placed .* Placed roles: both, left, right"
    ):
        executor.call("nobody", "echo")
    with pytest.raises(ValueError, match=r"role \('nobody'\) is not placed"):
        executor.call_on([0], "nobody", "echo")
    for ranks in ([], [99], [0, 0]):
        with pytest.raises(ValueError, match="must be some of those of role both"):
            executor.call_on(ranks, "both", "echo")


def calls_on_a_rank_run_in_the_order_issued(executor: Executor) -> None:
    names = ("both", "left", "right")
    for i in range(60):  # unread futures: order must come from the executor, not from waiting
        executor.call(names[i % 3], "note", i)
    issued = [[names[i % 3], i] for i in range(60)]
    for rank, notes in zip(executor.ranks["both"], executor.call("both", "read_notes").result(), strict=True):
        assert notes == [note for note in issued if rank in executor.ranks[note[0]]]


def calls_on_disjoint_ranks_overlap(executor: Executor) -> None:
    if not executor.capabilities.overlap:
        return
    slept = [executor.call(name, "sleep", 0.4) for name in ("left", "right")]
    assert not slept[0].done()
    (l0, l1), (r0, r1) = (future.first() for future in slept)
    assert min(l1, r1) - max(l0, r0) > 0.2
    first, second = executor.call("left", "sleep", 0.2), executor.call("both", "sleep", 0.0)
    assert second.result()[0][0] >= first.first()[1]


def futures_say_how_long_a_call_took(executor: Executor) -> None:
    executor.drain()
    executor.take_seconds()
    start = time.time()
    futures = [executor.call("left", "sleep", 0.2) for _ in range(2)]
    assert futures[1].role == "left" and futures[1].first() == futures[1].result()[0]
    assert all(future.done() and 0.2 <= future.seconds < 5.0 for future in futures)
    assert start < futures[0].ended <= futures[1].ended <= time.time()
    seconds = executor.take_seconds()
    assert list(seconds) == [("left", "sleep")]
    assert seconds["left", "sleep"] == pytest.approx(sum(future.seconds for future in futures))
    assert executor.take_seconds() == {}


def a_call_may_be_on_some_ranks(executor: Executor) -> None:
    last = executor.ranks["both"][-1]
    assert [s.owners for s in executor.call_on([last], "both", "make_samples", 1).first()] == [(last,)]


def wait_any_returns_what_is_done(executor: Executor) -> None:
    futures = [executor.call("left", "sleep", 1.0), executor.call("right", "sleep", 0.0)]
    done = executor.wait_any(futures)
    assert done and all(future.done() for future in done)
    if executor.capabilities.overlap:
        assert done == [futures[1]]
    executor.drain()
    assert executor.wait_any(futures) == futures
    with pytest.raises(ValueError, match="at least one future"):
        executor.wait_any([])


def large_values_arrive(executor: Executor) -> None:
    data = os.urandom(10 << 20)
    assert all(value == data + data for value in executor.call("both", "double", data).result())


def events_come_in_order_and_before_the_value(executor: Executor) -> None:
    executor.call("both", "emit", 20).result()
    events, ranks = executor.take_events(), executor.ranks["both"]
    assert {event.name for event in events} == {"counted"}
    for rank in ranks:
        assert [e.payload["number"] for e in events if e.rank == rank] == list(range(20))
    assert executor.take_events() == []
    assert executor.wait_event(timeout_s=0.05) is None


def events_of_one_name_are_taken_and_others_stay(executor: Executor) -> None:
    executor.call("left", "emit", 2).result()
    executor.call("left", "emit_later", 0.0).result()
    executor.call("left", "emit", 1).result()
    while "late" not in (names := [event.name for event in executor.take_events("late")]):
        assert executor.wait_any([executor.call("left", "echo")], or_event=True) is not None
    assert names == ["late"] and executor.take_events("late") == []
    assert [event.payload["number"] for event in executor.take_events()] == [0, 1, 0]


def events_wake_who_waits(executor: Executor) -> None:
    executor.call("left", "emit_later", 0.3).result()
    start = time.monotonic()
    event = executor.wait_event(WAIT_S)
    assert (event.rank, event.name, event.payload) == (0, "late", 0) and time.monotonic() - start < 10.0
    if executor.capabilities.overlap:
        executor.call("left", "emit_later", 0.2)
        busy = executor.call("right", "sleep", 2.0)
        if executor.ranks["left"] != executor.ranks["right"]:
            assert executor.wait_any([busy], or_event=True) == [] and not busy.done()
            assert executor.wait_any([busy], or_event=("counted", "late")) == [] and not busy.done()
            assert executor.wait_any([busy], or_event=("counted",)) == [busy], "an event of another name"
        assert executor.wait_event(WAIT_S).name == "late"
        busy.result()


def a_rank_takes_idle_steps_while_no_command_waits(executor: Executor) -> None:
    executor.call("both", "start_idling", 40).result()
    event = executor.wait_event(WAIT_S)
    assert (event.name, event.payload) == ("idled", 40)
    assert executor.call("both", "stop_idling").result() == [40] * len(executor.ranks["both"])


def ranks_take_the_same_number_of_idle_steps_before_a_command(executor: Executor) -> None:
    executor.call("both", "start_idling", 10_000).result()
    counts = []
    for _ in range(10):
        executor.wait_event(timeout_s=0.01)
        counts.append(executor.call("both", "count_idle_steps").result())
        executor.call("right", "echo")  # a command that the others skip
    executor.call("both", "stop_idling").result()
    assert all(len(set(of_ranks)) == 1 for of_ranks in counts), counts
    assert counts[-1][0] > counts[0][0], counts


def health_says_who_answers_and_where_he_is(executor: Executor) -> None:
    for _ in range(2):
        health = executor.health(wait_s=20.0)
        assert sorted(health.stacks) == executor.ranks["both"] and health.silent == []
    if executor.capabilities.overlap:
        busy = executor.call("left", "sleep", 3.0)
        time.sleep(0.3)
        assert "in sleep\n" in executor.health(wait_s=20.0).stacks[0]
        busy.result()


def the_loop_can_be_interrupted(executor: Executor) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt() -> None:
        raise Interrupted

    with contextlib.ExitStack() as last:
        last.callback(setattr, executor, "check_interrupt", lambda: None)
        executor.check_interrupt = interrupt
        before = executor.num_calls
        with pytest.raises(Interrupted):
            executor.call("left", "echo")
        assert executor.num_calls == before
        with pytest.raises(Interrupted):
            executor.wait_event(WAIT_S)
    assert executor.call("left", "echo").result() == [[[], {}]]


def drain_waits_for_every_call(executor: Executor) -> None:
    futures = [executor.call("left", "sleep", 0.2), executor.call("right", "sleep", 0.1)]
    executor.drain()
    assert all(future.done() for future in futures)


def calls_in_flight_are_aborted(executor: Executor) -> None:
    """As a signal does it: another thread asks for the abort, and wakes the loop."""

    class Interrupted(BaseException):
        pass

    asked = threading.Event()

    def check() -> None:
        if asked.is_set():
            raise Interrupted

    def ask() -> None:
        time.sleep(0.5)
        asked.set()
        executor.wake()

    executor.check_interrupt = check
    asking, start = threading.Thread(target=ask), time.monotonic()
    asking.start()
    with pytest.raises(Interrupted):
        executor.call("left", "wait_for_abort", WAIT_S).result()
    executor.check_interrupt = lambda: None
    asking.join()
    executor.abort_calls()
    assert time.monotonic() - start < 20.0
    assert executor.call("both", "echo", 1).result() == [[[1], {}]] * len(executor.ranks["both"])


CHECKS = (
    values_and_keywords,
    arguments_have_their_declared_types,
    results_have_the_types_of_the_interface,
    what_cannot_be_sent_is_refused_before_the_call,
    roles_and_ranks_are_checked,
    calls_on_a_rank_run_in_the_order_issued,
    calls_on_disjoint_ranks_overlap,
    futures_say_how_long_a_call_took,
    a_call_may_be_on_some_ranks,
    wait_any_returns_what_is_done,
    large_values_arrive,
    events_come_in_order_and_before_the_value,
    events_of_one_name_are_taken_and_others_stay,
    events_wake_who_waits,
    a_rank_takes_idle_steps_while_no_command_waits,
    ranks_take_the_same_number_of_idle_steps_before_a_command,
    health_says_who_answers_and_where_he_is,
    the_loop_can_be_interrupted,
    drain_waits_for_every_call,
    calls_in_flight_are_aborted,  # last: the token of a rank that aborts stays set
)


def an_error_names_everything_and_stays(executor: Executor) -> None:
    executor.label = "step 3"
    rank = executor.ranks["both"][-1]
    with pytest.raises(RemoteError) as raised:
        executor.call("both", "update", bad_rank=rank).result()
    error = raised.value
    first = f"[both rank {rank}] update failed at step 3: ValueError: learning rate (-1) must be positive"
    assert str(error).splitlines()[0] == first
    assert (error.role, error.rank, error.method, error.label) == ("both", rank, "update", "step 3")
    assert "in update\n" in error.remote_traceback and "hosting.py" not in error.remote_traceback
    for again in (
        lambda: executor.call("left", "echo").result(),
        lambda: executor.wait_event(WAIT_S),
        executor.drain,
    ):
        with pytest.raises(RemoteError, match=r"^\[both rank \d\] update failed at step 3"):
            again()


def an_error_between_calls_names_the_hook_and_the_last_step(executor: Executor) -> None:
    executor.label = "step 5"
    with pytest.raises(RemoteError) as raised:
        executor.call(
            "both", "start_idling", 7, fails=True
        ).result()  # a rank may fail before the other answers
        executor.wait_event(WAIT_S)
    error = raised.value
    assert (error.role, error.method, error.label) == ("both", "start_idling", "step 5")
    first = f"[both rank {error.rank}] start_idling failed at step 5: ValueError: 7 steps are too many"
    assert str(error).splitlines()[0] == first and "in step\n" in error.remote_traceback
    with pytest.raises(RemoteError, match="7 steps are too many"):
        executor.call("left", "echo").result()


def _fails_with(text: str, method: str, *args: object) -> Callable[[Executor], None]:
    def check(executor: Executor) -> None:
        with pytest.raises(RemoteError, match=text):
            executor.call("left", method, *args).result()

    return check


def a_call_that_takes_too_long_is_named_with_its_stacks(executor: Executor) -> None:
    executor.label = "step 4"
    executor.call("both", "echo").result()
    executor.call_timeout_s = LATE_S
    executor.call("right", "sleep", WAIT_S)
    with pytest.raises(CallTimeout) as raised:
        executor.call("both", "echo").result()
    (right,) = executor.ranks["right"]
    text = str(raised.value)
    assert text.startswith(f"[right] sleep timed out at step 4: no answer from rank {right} within ")
    assert f"[rank {right}] was here:\n" in text and "in sleep\n" in text


def a_rank_that_dies_is_a_failure(executor: Executor) -> None:
    rank, start = executor.ranks["both"][-1], time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank {rank}.* was killed by SIGKILL"):
        executor.call("both", "die", bad_rank=rank).result()
    assert time.monotonic() - start < 20.0


def a_rank_that_leaves_is_a_failure(executor: Executor) -> None:
    rank = executor.ranks["both"][-1]
    with pytest.raises(RuntimeError, match=rf"rank {rank}.* ended with exit code 0; stderr may say why"):
        executor.call("both", "leave", bad_rank=rank).result()


FAILURES: dict[str, Callable[[Executor], None]] = {
    "raises": an_error_names_everything_and_stays,
    "idle": an_error_between_calls_names_the_hook_and_the_last_step,
    "result": _fails_with(
        r"^\[left rank 0\] generator failed: .*its result \(generator\) cannot be sent", "generator"
    ),
    "result_type": _fails_with(
        r"^\[left rank 0\] wrong_result failed: .*its result is not of the declared type", "wrong_result"
    ),
    "argument_type": _fails_with(
        r"^\[left rank 0\] sleep failed: TypeError: argument seconds is not of the declared type",
        "sleep",
        "1",
    ),
    "event": _fails_with(r"event bad of rank 0 cannot be sent: generator is no plain", "emit_generator"),
    "deadline": a_call_that_takes_too_long_is_named_with_its_stacks,
    "death": a_rank_that_dies_is_a_failure,
    "leaves": a_rank_that_leaves_is_a_failure,
    "killed": lambda executor: executor.kill(1),
}
"""Check -> after it the executor is of no more use. "deadline", "death" and "leaves" are for executors that
declare deadlines and rank processes."""

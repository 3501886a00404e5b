"""The executor over the job's c10d store: commands out, results in, deadlines."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch.distributed as dist

from megarl.runtime.executor import (
    CallTimeout,
    RemoteError,
    RoleHandle,
    at_step,
    check_role,
    check_some,
    check_subset,
)
from megarl.runtime.stop_request import StopRequest
from megarl.runtime.signing import JOB_SECRET, job_secret
from megarl.runtime.mailbox import SHUTDOWN, TERMINATED, Command, Mailbox, Result, connect
from megarl.runtime.process import has_died, process_name, world_size_from_env
from megarl.runtime.shutdown_listener import ABORT_CALLS, ALL_RANKS_KNOW, DRIVER, PING, PROCESS

_TICK_S = 1.0  # between two looks at the clock
_SIGNAL_S = 1.0  # for a signal that came at the same time to be handled
_STACKS_S = 3.0  # that ranks may take to say where they hang
_SOON_S, _PING_S = 0.5, 5.0  # ... or that they live
_LOCK_S = 1.0


class _Future:
    """A call in flight. The executor's reader thread fills it in."""

    def __init__(self, executor: StoreExecutor, index: int, command: Command):
        self.index, self.command, self.issued = index, command, executor._now()
        self.values: dict[int, object] = {}
        self.seconds = self.ended = 0.0
        self._executor = executor

    @property
    def role(self) -> str:
        return self.command.role

    def missing(self) -> list[int]:
        return [rank for rank in self.command.ranks if rank not in self.values]

    def result(self) -> list:
        self._executor._wait(self)
        return [self.values[rank] for rank in self.command.ranks]

    def first(self) -> object:
        return self.result()[0]

    def done(self) -> bool:
        return self._executor._is_done(self)


class StoreExecutor:
    """An Executor over the job's store. A reader thread takes results from the inbox as they come, so an
    error of any rank is known at once, whatever the driver is waiting for or doing.

    Args:
        ranks: role -> its ranks. Every rank of the world needs a role.
        world_size: ranks of the job.
        call_timeout_s: seconds that a rank may take for one call, from when it is free to start it.
        writer, reader: two connections to the store; see `mailbox.connect`.
    """

    def __init__(
        self,
        ranks: dict[str, list[int]],
        world_size: int,
        call_timeout_s: float,
        writer: dist.Store,
        reader: dist.Store,
    ):
        _check_ranks(ranks, world_size)
        self.ranks = {role: list(of_role) for role, of_role in ranks.items()}
        self.step: int | None = None
        self.stop = StopRequest()
        self.failure: RuntimeError | None = None
        self.death_first_s = 0.0
        """So long what a rank raises is kept back, where someone tells `fail` of dead ranks: that one died is
        why another raised."""
        self.is_shutting_down: Callable[[], bool] = lambda: False
        """Asked then: whether the job is being ended, for a reason that is not what the rank raised."""
        self.on_terminated: Callable[[], None] = lambda: None
        """Called, on another thread, when a rank has got SIGTERM."""
        self._timeout_s, self._stopped_s = call_timeout_s, 0.0
        self._outbox, self._inbox = Mailbox(writer), Mailbox(reader)
        self._outbox.set(DRIVER, process_name())
        self._changed = threading.Condition()
        self._futures: dict[int, _Future] = {}  # calls in flight, by index
        self._queues: dict[int, deque[int]] = {
            rank: deque() for rank in range(world_size)
        }  # their indices on each rank, oldest first
        self._free_since = dict.fromkeys(range(world_size), 0.0)
        self._ended = False
        self._next, self._log = (
            0,
            deque(),
        )  # next index; (index, keys) of the commands that are still in the store
        self._answered = dict.fromkeys(
            range(world_size), -1
        )  # newest index that each rank answered, and so the newest it surely read
        self._seconds: dict[tuple[str, str], float] = {}
        self._reader = threading.Thread(target=self._read, name="read_inbox", daemon=True)
        self._reader.start()

    @classmethod
    def from_env(cls, ranks: dict[str, list[int]], call_timeout_s: float) -> StoreExecutor:
        """In the driver process: connect to the job that `start_driver` described."""
        job_secret()
        os.environ.pop(JOB_SECRET, None)  # the driver's children have no use for it
        writer, reader = (
            connect(os.environ["MEGARL_STORE"], os.environ["MEGARL_STORE_PREFIX"]) for _ in range(2)
        )
        return cls(ranks, world_size_from_env(), call_timeout_s, writer, reader)

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> _Future:
        check_role(self.ranks, role)
        return self.call_on(self.ranks[role], role, method, *args, **kwargs)

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: object, **kwargs: object
    ) -> _Future:
        check_subset(self.ranks, role, ranks)
        return self._issue(Command(role, tuple(ranks), method, self.step, pickle.dumps((args, kwargs))))

    def wait_any(self, futures: Sequence[_Future]) -> list[_Future]:
        check_some(futures)
        with self._changed:
            while self.failure is None and all(future.index in self._futures for future in futures):
                self.stop.check()
                self._wait_for_change(self._seconds_left())
            if self.failure is not None:
                raise self.failure
            return [future for future in futures if future.index not in self._futures]

    def role(self, name: str) -> RoleHandle:
        check_role(self.ranks, name)
        return RoleHandle(self, name)

    def take_seconds(self) -> dict[tuple[str, str], float]:
        with self._changed:
            taken, self._seconds = self._seconds, {}
        return taken

    def shutdown(self) -> None:
        if not self._ended:
            self._outbox.ask_for_stacks()  # whoever waits to be asked is in the store's code, see `_end`
            for key in (PING, ABORT_CALLS, ALL_RANKS_KNOW):
                self._outbox.set(key, "end")
            self._issue(Command("", tuple(self._queues), SHUTDOWN, self.step, b"")).result()
            self._end()

    @property
    def num_calls(self) -> int:
        """Calls issued so far."""
        return self._next

    def kill(self, exit_code: int) -> None:
        """Tell the workers that the job is over: they exit with this code, without waiting for the driver's
        end."""
        self._outbox.kill(self._next, exit_code)
        self._end()

    def wake(self) -> None:
        """Let whoever waits look at `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def ask_who_lives(self) -> list[int]:
        """Ranks that have died, or do not answer. From another thread than the loop's."""
        missing = self._outbox.ask_all(PING, list(self._queues), _SOON_S)
        dead = [rank for rank, name in self._outbox.of_ranks(PROCESS, missing).items() if has_died(name)]
        return dead or self._outbox.ask_all(PING, missing, _PING_S)

    def abort_calls(self) -> None:
        """Have ranks abort the calls in flight where they can, and wait for the end of all. No value of them
        is of use any more."""
        if not self._outbox.ask_all(ABORT_CALLS, list(self._queues), _PING_S, str(self._next)):
            self._outbox.set(ALL_RANKS_KNOW, "asked")
        while futures := list(self._futures.values()):
            self.wait_any(futures)

    def where(self) -> str:
        """What the driver waits for, in words: "at step 3, waiting for actor.update on rank 1"."""
        when = at_step(self.step).strip() or "before the first step"
        if not self._changed.acquire(
            timeout=_LOCK_S
        ):  # a thread that hangs in the store has it; whoever asks may be there to end it
            return f"{when}, in the job's store"
        try:
            calls = [
                f"{f.command.role}.{f.command.method} on rank {', '.join(map(str, f.missing()))}"
                for f in self._futures.values()
            ]
        finally:
            self._changed.release()
        return f"{when}, waiting for {' and '.join(calls)}" if calls else f"{when}, no call in flight"

    def _end(self) -> None:
        """End the reader thread: a process that exits while a thread is in the store's C++ code may be
        terminated by it."""
        self._ended = True
        self._outbox.close()
        self._reader.join(timeout=1.0)

    def _issue(self, command: Command) -> _Future:
        with self._changed:
            if self.failure is not None:
                raise self.failure
            self.stop.before_call(command.method)
            future = _Future(self, self._next, command)
            self._futures[future.index] = future
            for rank in command.ranks:
                self._queues[rank].append(future.index)
            self._next += 1
            self._log.append((future.index, self._outbox.post(future.index, command)))
        return future

    def _wait(self, future: _Future) -> None:
        self.wait_any([future])

    def _is_done(self, future: _Future) -> bool:
        with self._changed:
            if self.failure is not None:
                raise self.failure
            return future.index not in self._futures

    def _now(self) -> float:
        """Seconds on a clock that stands while this process is stopped (Ctrl-Z): what the ranks answered
        meanwhile was not late."""
        return time.monotonic() - self._stopped_s

    def _wait_for_change(self, seconds: float) -> None:
        start, tick = time.monotonic(), min(seconds, _TICK_S)
        self._changed.wait(tick)
        if (lost := time.monotonic() - start - tick) > _TICK_S:
            self._stopped_s += lost

    def _seconds_left(self) -> float:
        """Until the next deadline. Past one: set the failure. A rank's clock starts when its oldest call
        could start there."""
        now = self._now()
        waited = {
            rank: now - max(self._futures[queue[0]].issued, self._free_since[rank])
            for rank, queue in self._queues.items()
            if queue
        }
        slowest = max(waited, key=waited.__getitem__)
        if waited[slowest] >= self._timeout_s:
            late = self._futures[self._queues[slowest][0]]
            c = late.command
            stacks = self._outbox.stacks(list(self._queues), wait_s=_STACKS_S)
            self.failure = CallTimeout(
                c.role or "driver",
                c.method,
                c.step,
                late.missing(),
                sorted(late.values),
                self._timeout_s,
                stacks,
            )
            return 0.0
        return self._timeout_s - waited[slowest]

    # The reader thread.

    def _read(self) -> None:
        try:
            while (result := self._inbox.receive()) is not None:
                if result.index == TERMINATED:
                    self.on_terminated()
                elif result.failure is not None:
                    f = result.failure
                    time.sleep(self.death_first_s)
                    if self.is_shutting_down():
                        continue
                    self.fail(RemoteError(f.role, result.rank, f.method, f.step, f.error, f.traceback))
                elif self.failure is None:
                    self._accept(result)
                    self._inbox.delete(self._read_by_all())
        except Exception as error:  # thread boundary: the main thread would wait for ever
            time.sleep(
                _SIGNAL_S
            )  # Ctrl-C also ends whoever keeps the store; then it is the signal that tells what happened
            text = (
                f"[driver] cannot hear the workers any more {self.where()}: {type(error).__name__}: {error}"
            )
            self.fail(RuntimeError(text.splitlines()[0]))

    def _accept(self, result: Result) -> None:
        """Store one value; tell the main thread if it was the call's last."""
        with self._changed:
            future = self._futures[result.index]
            c = future.command
            try:
                future.values[result.rank] = pickle.loads(result.value)
            except Exception as error:  # a class that only exists on the worker, say
                text = f"its result cannot be read by the driver: {error!r}"
                return self.fail(RemoteError(c.role, result.rank, c.method, c.step, text, ""))
            self._queues[result.rank].popleft()
            self._free_since[result.rank] = self._now()
            self._answered[result.rank] = result.index
            future.seconds, future.ended = (
                max(future.seconds, result.seconds),
                max(future.ended, result.ended),
            )
            if not future.missing():
                del self._futures[result.index]
                self._seconds[c.role, c.method] = self._seconds.get((c.role, c.method), 0.0) + future.seconds
                self._changed.notify_all()

    def fail(self, error: RuntimeError) -> None:
        """From now on every wait raises this, unless something has failed before."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _read_by_all(self) -> list[str]:
        """Keys of the commands that every rank has read."""
        keys: list[str] = []
        with self._changed:
            oldest = min(self._answered.values())
            while self._log and self._log[0][0] <= oldest:
                keys += self._log.popleft()[1]
        return keys


def _check_ranks(ranks: dict[str, list[int]], world_size: int) -> None:
    placed = {rank for of_role in ranks.values() for rank in of_role}
    if outside := sorted(placed - set(range(world_size))):
        raise ValueError(
            f"roles are placed on ranks {outside}, but the job has {world_size} ranks (0 to "
            f"{world_size - 1}). Start more."
        )
    if idle := sorted(set(range(world_size)) - placed):
        raise ValueError(
            f"no role is placed on ranks {idle} of the {world_size} that were started. Start fewer, "
            "or place a role there."
        )

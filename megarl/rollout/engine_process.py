"""Run a transformers engine in a process of its own: `python -m megarl.rollout.engine_process`.

    rank        RemoteEngine, which sends a Call per method and waits for its Answer
    process     a TransformersEngine, on which the calls run one after the other

Calls and answers are messages of declared types: a method's annotations say how its arguments and its result
are read. The socket between both is the standard input of the process. The engine takes a step when the rank
asks for one. The rank waits for the step's end only a moment, and else when it makes its next call."""

from __future__ import annotations

import functools
import logging
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from typing import get_type_hints

import torch
import torch.distributed as dist

from megarl.messages import decode, encode
from megarl.rollout.backends import EngineSetup
from megarl.rollout.engine_core import check_step
from megarl.rollout.engine_errors import EngineFailed, RemoteTraceback
from megarl.rollout.environment import end_with_owner, engine_environment
from megarl.rollout.interface import InferenceEngine
from megarl.rollout.patience import Patience
from megarl.rollout.processes import EngineDied, EngineHangs, how_it_ended, visible_devices
from megarl.rollout.puller import Order, Outcome
from megarl.rollout.requests import Output, Request, Running
from megarl.rollout.transformers_engine import EngineOptions, TransformersEngine

logger = logging.getLogger(__name__)
_START_S, _ANSWER_S = 300.0, 10.0
_REPORT_STEPS = 16  # steps after which the process reports the tokens of unfinished requests
_STEP_S = 0.01  # time that the rank waits for the end of a step


def start_process(setup: EngineSetup, double_buffer: bool) -> InferenceEngine:
    """Start a transformers engine in a process of its own, on the device of this rank."""
    return RemoteEngine(EngineOptions.of(setup, double_buffer))


@dataclass(frozen=True)
class Call:
    """Message to the engine's process: call this method of the engine."""

    number: int
    method: str
    arguments: list[bytes]


@dataclass(frozen=True)
class Answer:
    """Message of the engine's process: the result of a call, or the error that it raised."""

    number: int
    result: bytes = b""
    error: str | None = None
    traceback: str = ""


@dataclass(frozen=True)
class Started:
    """The facts about a new engine that its process reports to the rank."""

    device: str
    weights: dict[str, tuple[tuple[int, int], str]]
    """Name -> ([rows, cols], dtype)."""


@dataclass(frozen=True)
class State:
    """State of the engine after a call that changes it."""

    finished: list[Output]
    """Requests that have finished since the last State."""
    has_unfinished: bool
    num_steps: int
    free_kv_tokens: int
    progress: list[Output] = field(default_factory=list)
    """Tokens of unfinished requests since the last report."""


class HostedEngine:
    """The methods that a RemoteEngine calls in the engine's process."""

    engine: TransformersEngine

    def __init__(self) -> None:
        self._num_reported: dict[str, int] = {}  # tokens by request

    def start(self, options: EngineOptions) -> Started:
        self.engine = TransformersEngine(options)
        weights = self.engine.tensors[options.rank].items()
        return Started(
            self.engine.device,
            {name: (tuple(view.shape), str(view.dtype).removeprefix("torch.")) for name, view in weights},
        )

    def _state(self) -> State:
        engine = self.engine
        return State(engine.take(), engine.has_unfinished(), engine.num_steps, engine.free_kv_tokens())

    def add(self, requests: list[Request]) -> State:
        self.engine.add(requests)
        self._forget(request.id for request in requests)
        return self._state()

    def _forget(self, ids: Iterable[str]) -> None:
        for name in ids:
            self._num_reported.pop(name, None)

    def step(self) -> State:
        self.engine.step()
        return self._state()

    def step_and_report(self) -> State:
        """Take a step, and report the tokens of unfinished requests that are new since the last report."""
        state, sampled = self.step(), self.engine.progress()
        reported = self._num_reported
        self._num_reported = {output.id: len(output.token_ids) for output in sampled}
        return replace(state, progress=[output.after(reported.get(output.id, 0)) for output in sampled])

    def progress(self) -> list[Output]:
        return self.engine.progress()

    def abort(self, ids: list[str]) -> State:
        self.engine.abort(ids)
        self._forget(ids)
        return self._state()

    def reset_cache(self) -> State:
        self.engine.reset_cache()
        return self._state()

    def release_kv_cache(self) -> State:
        self.engine.release_kv_cache()
        return self._state()

    def pull_weights(self, order: Order) -> None:
        self.engine.pull_weights([order], 0.0)

    def wait_for_weights(self, timeout_s: float) -> list[Outcome]:
        return self.engine.wait_for_weights(timeout_s)

    def commit(self, version: int, running: Running) -> State:
        self.engine.commit(version, running)
        return self._state()

    def set_version(self, version: int) -> None:
        self.engine.set_version(version)

    def give_up_weights(self) -> None:
        self.engine.give_up_weights()


@functools.cache
def _types(method: str) -> tuple[list[object], object]:
    """Return the types of a hosted method's arguments, and the type of its result."""
    *arguments, result = get_type_hints(getattr(HostedEngine, method)).values()
    return arguments, result


def main() -> None:
    """Answer calls until the rank closes the connection or ends."""
    end_with_owner()
    connection, hosted = Connection(os.dup(0)), HostedEngine()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    while True:
        try:
            call = decode(connection.recv_bytes(), Call)
        except (EOFError, ConnectionError):
            return
        try:
            types, _ = _types(call.method)
            arguments = [decode(data, kind) for data, kind in zip(call.arguments, types, strict=True)]
            answer = Answer(call.number, encode(getattr(hosted, call.method)(*arguments)))
        except Exception as error:  # process boundary
            text = "".join(traceback.format_exception_only(error)).strip()
            answer = Answer(call.number, error=text, traceback=traceback.format_exc().rstrip())
        try:
            connection.send_bytes(encode(answer))
        except ConnectionError:  # the rank has ended, and says why
            return


class RemoteEngine(InferenceEngine):
    """A transformers engine in a process that this one starts, on the device of this rank.

    Raises: EngineDied once the process has ended; EngineFailed with the error of the process."""

    def __init__(self, options: EngineOptions) -> None:
        self._rank, self._double_buffer = dist.get_rank(), options.double_buffer
        self.process = f"engine of rank {self._rank}"
        self.dtype, self.atlases = getattr(torch, options.dtype), {}
        self._connection, theirs = Pipe()
        with engine_environment(visible_devices([options.rank], "--rollout-ranks"), None):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megarl.rollout.engine_process"], stdin=theirs.fileno()
            )
        theirs.close()
        self._number, self._is_paused, self._is_pulling = 0, False, False
        self._step_number: int | None = None  # number of the call of a step that may be under way
        self._step_s = 0.0  # time that this process has waited for the step under way
        self._steps_to_report = _REPORT_STEPS
        self.patience = Patience()
        self._held_at: int | None = None
        self._finished: list[Output] = []
        self._progress: dict[str, Output] = {}  # reported tokens of unfinished requests
        self._state = State([], has_unfinished=False, num_steps=0, free_kv_tokens=0)
        try:
            started = self._call("start", options, timeout_s=_START_S)
        except BaseException:  # nobody else knows the process
            self.kill()
            raise
        self.device = started.device
        self.tensors = {
            options.rank: {
                name: torch.empty(size, dtype=getattr(torch, dtype), device="meta")
                for name, (size, dtype) in started.weights.items()
            }
        }

    def _call(self, method: str, *arguments: object, timeout_s: float = 0.0):
        """Return the result of a method of the HostedEngine, once a step under way has ended.

        Args:
            timeout_s: time that the method itself may take.
        Raises: EngineHangs if there is no answer in time."""
        self._end_step(None)
        timeout_s += self.patience.limit_s if self.patience.is_limited else _ANSWER_S
        answer, _ = self._answer(self._send(method, *arguments), timeout_s)
        if answer is None:
            raise self._hang(timeout_s)
        return decode(answer.result, _types(method)[1])

    def _hang(self, timeout_s: float) -> EngineHangs:
        return EngineHangs(
            f"[rank {self._rank}] the engine's process did not answer within {timeout_s:.0f} s"
        )

    def _send(self, method: str, *arguments: object) -> int:
        """Send a call, and return its number."""
        self._number += 1
        call = Call(self._number, method, [encode(argument) for argument in arguments])
        try:
            self._connection.send_bytes(encode(call))
        except ConnectionError:
            self.version = None
            raise self._death() from None
        return self._number

    def _answer(self, number: int, timeout_s: float) -> tuple[Answer | None, float]:
        """Return the answer to a call, or None if there is none in time, and the seconds waited. Raises the
        error of the process."""
        answer, waited_s = Answer(0), 0.0
        try:
            while answer.number != number:  # an earlier call may have been given up
                is_there, of_poll = self.patience.wait(self._connection.poll, timeout_s - waited_s)
                waited_s += of_poll
                if not is_there:
                    return None, waited_s
                answer = decode(self._connection.recv_bytes(), Answer)
        except (EOFError, ConnectionError):
            self.version = None
            raise self._death() from None
        if answer.error is not None:
            failed = EngineFailed(f"[rank {self._rank}] the engine failed: {answer.error}")
            raise failed from RemoteTraceback(answer.traceback)
        return answer, waited_s

    def _end_step(self, timeout_s: float | None) -> None:
        """Wait for the end of the step under way, if there is one, until the time is over.

        Raises: EngineHangs for a step that takes longer than an engine may need."""
        number, self._step_number = self._step_number, None
        if number is None:
            return
        limit_s = self.patience.limit_s if self.patience.is_limited else math.inf
        left_s = max(0.0, limit_s - self._step_s)
        answer, waited_s = self._answer(number, left_s if timeout_s is None else min(timeout_s, left_s))
        self._step_s += waited_s
        if answer is not None:
            self.patience.note_step(self._step_s)
            self._take_over(decode(answer.result, State))
        elif self._step_s >= limit_s:
            raise self._hang(limit_s)
        else:
            self._step_number = number

    def _take_over(self, state: State) -> None:
        self._finished += state.finished
        self._state = state
        for output in state.finished:
            self._progress.pop(output.id, None)
        for new in state.progress:
            known = self._progress.get(new.id)
            self._progress[new.id] = new if known is None else known.followed_by(new)

    def _forget(self, ids: Iterable[str]) -> None:
        for name in ids:
            self._progress.pop(name, None)

    def _death(self) -> EngineDied:
        try:
            code = self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            code = None
        return EngineDied(f"[rank {self._rank}] the process of the engine died ({how_it_ended(code)})")

    def add(self, requests: Sequence[Request]) -> None:
        self._forget(request.id for request in requests)
        self._take_over(self._call("add", list(requests)))

    def has_unfinished(self) -> bool:
        return self._state.has_unfinished

    def step(self) -> None:
        is_still = self._is_paused or self.version is None or self._state.num_steps == self._held_at
        if self._step_number is None and is_still:
            time.sleep(_STEP_S)
            return
        if self._step_number is None:
            self._step_s, self._steps_to_report = 0.0, self._steps_to_report - 1
            reports = self.patience.is_limited and self._steps_to_report <= 0
            if reports:
                self._steps_to_report = _REPORT_STEPS
            self._step_number = self._send("step_and_report" if reports else "step")
        self._end_step(_STEP_S)

    def take(self) -> list[Output]:
        finished, self._finished = self._finished, []
        return finished

    def progress(self) -> list[Output]:
        return self._call("progress")

    def reported(self) -> list[Output]:
        return [*self._progress.values()]

    def abort(self, ids: Sequence[str]) -> None:
        self._take_over(self._call("abort", list(ids)))
        self._forget(ids)
        self._finished = [output for output in self._finished if output.id not in ids]

    def pause(self) -> None:
        self._is_paused = True
        self._end_step(None)

    def resume(self) -> None:
        self._is_paused = False

    @property
    def num_steps(self) -> int:
        self._end_step(None)
        return self._state.num_steps

    def hold(self, step: int | None) -> None:
        check_step(step, self.num_steps)
        self._held_at = step

    def free_kv_tokens(self) -> int:
        """Return for how many tokens the KV cache has room, as the engine reported with its last step or
        request."""
        return self._state.free_kv_tokens

    def reset_cache(self) -> None:
        self._take_over(self._call("reset_cache"))

    def release_kv_cache(self) -> bool:
        self._take_over(self._call("release_kv_cache"))
        return True

    def write_weights(self, copy: Callable[[], object]) -> None:
        raise TypeError("another process holds the weights: call pull_weights")

    def pull_weights(self, orders: Sequence[Order], timeout_s: float) -> None:
        if not self._double_buffer:
            if self.patience.is_limited:
                self.progress()  # an engine that hangs is found before the long call
            self.version = None  # the copies overwrite the weights in place
        self._is_pulling = True
        returns_at_once = self._double_buffer and self.patience.is_limited
        self._call("pull_weights", orders[0], timeout_s=0.0 if returns_at_once else timeout_s)

    def wait_for_weights(self, timeout_s: float) -> list[Outcome]:
        return self._call("wait_for_weights", timeout_s, timeout_s=timeout_s)

    def commit(self, version: int, running: Running = "refuse") -> None:
        self._end_step(None)
        if running == "refuse" and self._state.has_unfinished:
            raise RuntimeError(f"version {version} cannot be committed: requests are unfinished")
        self._is_pulling, self.version = False, None
        self._take_over(self._call("commit", version, running))
        self.version = version

    def set_version(self, version: int) -> None:
        self._call("set_version", version)
        self.version = version

    def give_up_weights(self) -> None:
        if self._is_pulling and self._process.poll() is None:
            self._is_pulling = False
            self._call("give_up_weights")

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            self.version = None
            raise self._death()

    def kill(self) -> None:
        self.version = None
        self._process.kill()
        self._wait_for_end()
        self._connection.close()

    def _wait_for_end(self) -> None:
        """Wait at most 10 seconds for the end of a killed process, which a GPU's driver or a file system may
        delay."""
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "warning: [rank %d] the engine's process %d has not ended %.0f s after SIGKILL. Its GPU memory "
                "may stay in use.",
                *(self._rank, self._process.pid, _ANSWER_S),
            )

    def shutdown(self) -> None:
        """End the engine's process."""
        self.version = None
        self._connection.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._wait_for_end()


if __name__ == "__main__":
    main()

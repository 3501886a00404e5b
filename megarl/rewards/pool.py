"""Run reward functions in processes that can be killed, so that a bad function costs one reward, not the run.

    with RewardPool(config.data, num_workers=2) as pool:
        probe_reward(pool, dataset)         # before training: does every kind of row get a reward?
        verdicts = pool.score(samples)      # a reward per sample, or the reason why there is none

A function fails for a sample if it raises, returns no finite number, hangs, dies, forks and returns in the
child, or asks for too much memory. The next sample gets a fresh process.

A process has one call at a time, in its main thread, where a function may set alarms and start processes. If
calls mostly wait, as for a judge over HTTP, further processes are started: they cost a fraction of a second
once, and isolate each call as the first ones do. A reply counts only if it has the number of the request and
the digest of its text, and comes from the process that received them. The user's file runs in these processes
only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from megarl.config.reward_models import rule_judges_agents, uses_rule_reward
from megarl.config.schema import DataConfig, TrainConfig
from megarl.messages import encode
from megarl.rewards import load_reward
from megarl.rewards.base import RewardFunction, RewardSample, describe, judge
from megarl.rewards.pool_messages import Reply, Request, read_replies
from megarl.files.printed import Printed
from megarl.runtime.abort import ABORT

_LOOK_S = 0.2  # interval between two looks for an abort
_FORKED = (
    "forked and returned in the child, which is no process of the pool's. Let the child end "
    "in the function (os._exit), or try subprocess"
)
_FORKED_WHILE_LOADED = (
    "the file of the reward function forks while it is loaded, and goes on in "
    "the child. Let the child end (os._exit)."
)
_START_S = 120.0  # the user's file may have slow imports
_MOST_PROCESSES = 32  # for calls that wait, unless --reward-num-workers says how many


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward of one sample, or the reason why there is none."""

    reward: float | None
    failure: str | None = None
    """Reason why the reward is None, with the function's traceback if it raised."""
    sample_id: int | None = None
    """Id of the judged sample."""
    digest: int | None = None
    """Digest of the judged text, see `RewardSample.digest`."""
    answer: str | None = None
    """Answer that the function found in the response: "" if it found none, None if the function names no
    answers."""
    scores: dict[str, float] | None = None
    """Unweighted scores by name, if the function returned several."""


class RewardPool:
    """Processes that call the reward function for samples. One that had to be killed is replaced.

    Use a pool on a thread that lives as long as the pool: the kernel ends the processes with the thread that
    started them.

    Args:
        num_workers: number of processes. 0 calls the function in this process, for pdb, without limits.
        data: the reward function and its limits.
        check: is called every 0.2 s while samples are scored, and raises Aborted if nobody wants their
            rewards any more.
    Raises: ValueError if the function cannot be loaded."""

    def __init__(self, data: DataConfig, num_workers: int, check: Callable[[], None] = ABORT.check) -> None:
        self.data, self._check = data, check
        self._num_requests = 0
        self._function = None if num_workers else load_reward(data)
        self._most = num_workers if data.reward_num_workers is not None else max(num_workers, _MOST_PROCESSES)
        self._workers = [_Worker(data) for _ in range(num_workers)]
        try:
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    @property
    def num_calls(self) -> int:
        """Number of samples that are scored at a time."""
        return len(self._workers)

    def score(self, samples: Sequence[RewardSample]) -> list[Verdict]:
        """Return a `Verdict` per sample, in order: its reward, or the reason why the reward function failed.

        Raises: ValueError if the function cannot be loaded again after a process had to be killed."""
        if self._function is not None:
            return [_judge_here(self._function, sample, self.data) for sample in samples]
        verdicts: list[Verdict] = [Verdict(None)] * len(samples)
        first_request = self._num_requests
        requests: list[int] = []  # sample of each request of this call, from first_request on
        waiting, idle = deque(range(len(samples))), list(self._workers)
        too_slow = f"took longer than --reward-timeout-s ({self.data.reward_timeout_s:g}) and was killed"

        def fail(index: int, why: str) -> None:
            who = describe(self.data.reward_function or self.data.reward or "auto", samples[index])
            verdicts[index] = _verdict(samples[index], None, f"{who} {why}")

        def fail_forked(strangers: Iterable[Reply]) -> None:
            for stranger in strangers:
                request = stranger.request
                if request is not None and 0 <= request - first_request < len(requests):
                    fail(requests[request - first_request], _FORKED)

        running: dict[_Worker, tuple[int | None, float]] = {}
        """Worker -> its sample, None while it starts, and its deadline."""
        while waiting or running:
            while waiting and idle:
                worker, index = idle.pop(), waiting.popleft()
                worker.ask(self._num_requests, samples[index])
                self._num_requests += 1
                requests.append(index)
                running[worker] = index, time.monotonic() + self.data.reward_timeout_s
            first = min(deadline for _, deadline in running.values())
            ready = wait([*running], min(_LOOK_S, max(0.0, first - time.monotonic())))
            self._check()
            now = time.monotonic()
            for worker, (index, deadline) in list(running.items()):
                if worker not in ready and now < deadline:
                    continue
                del running[worker]
                if index is None:
                    worker.wait_until_ready()
                    idle.append(worker)
                    continue
                reply, strangers = worker.receive() if worker in ready else (None, [])
                if reply is not None:
                    verdicts[index] = _verdict(
                        samples[index], reply.reward, reply.failure, reply.answer, reply.scores
                    )
                    if reply.waits and waiting and len(self._workers) < self._most:
                        self._workers.append(_Worker(self.data))
                        running[self._workers[-1]] = None, now + _START_S
                elif all(stranger.request == worker.request for stranger in strangers):
                    fail(index, worker.cause_of_death() if worker in ready and not strangers else too_slow)
                else:  # a child of an earlier request replied instead: this sample has not run
                    waiting.appendleft(index)
                fail_forked(strangers)
                idle.append(worker if reply is not None and not strangers else self._restart(worker))
        for worker in list(self._workers):
            if wait([worker], 0.0) and (strangers := worker.read()):
                fail_forked(strangers)
                self._restart(worker)
        for worker in self._workers:
            worker.printed.end_call()
        return verdicts

    def _restart(self, worker: _Worker) -> _Worker:
        worker.kill()
        new = _Worker(self.data)
        self._workers[self._workers.index(worker)] = new
        new.wait_until_ready()
        return new


def _judge_here(function: RewardFunction, sample: RewardSample, data: DataConfig) -> Verdict:
    try:
        score = judge(function, sample, data.weights_of_scores)
        answer, scores = getattr(score, "answer", None), getattr(score, "scores", None)
        return _verdict(sample, float(score), None, answer, scores)
    except ValueError as error:
        return _verdict(sample, None, str(error))


def _verdict(
    sample: RewardSample,
    reward: float | None,
    failure: str | None,
    answer: str | None = None,
    scores: dict[str, float] | None = None,
) -> Verdict:
    return Verdict(reward, failure, sample.sample_id, sample.digest, answer, scores)


def probe_rule(config: TrainConfig, datasets: Iterable[tuple[Sequence[Any], str]]) -> None:
    """Try the rule of a job, if it has one, on the first rows of the data sets of (rows, flag).

    Raises: ValueError with the first failure."""
    has_rule = not config.episodes.has_turns or rule_judges_agents(config)
    if has_rule and config.algorithm.needs_rollout and uses_rule_reward(config):
        with RewardPool(config.data, num_workers=1) as pool:
            for dataset, flag in datasets:
                probe_reward(pool, dataset, flag)


def probe_reward(pool: RewardPool, dataset: Sequence[Any], flag: str = "--train-data") -> None:
    """Score a few rows before training starts, and raise ValueError if the reward function fails for one.

    The first row of every data source is judged twice: for an empty response, and for its ground truth as the
    response.

    Args:
        dataset: rows with `data_source`, `ground_truth` and `extra_info` (a PromptDataset).
    Raises: ValueError with the first failure.
    """
    first_rows: dict[str, int] = {}
    for index in range(len(dataset)):
        first_rows.setdefault(dataset[index].data_source, index)
    for index in first_rows.values():
        row = dataset[index]
        responses = dict.fromkeys(("", row.ground_truth if isinstance(row.ground_truth, str) else ""))
        for verdict in pool.score(
            [RewardSample(row.data_source, text, row.ground_truth, row.extra_info) for text in responses]
        ):
            if verdict.failure is not None:
                raise ValueError(f"before training, on row {index} (from 0) of {flag}: {verdict.failure}")


class _Worker:
    """One process of a pool (pool_worker.py), as the pool sees it. Its replies are checked, as the user's
    code may write into the pipe."""

    request = digest = -1
    """Number of the last request, and digest of its text."""

    def __init__(self, data: DataConfig) -> None:
        own = data.reward_function
        self._flag = f"--reward-function ({own})" if own else f"--reward ({data.reward or 'auto'})"
        self.printed = Printed("reward")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megarl.rewards.pool_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed.writer,
            start_new_session=True,
        )
        self.printed.follow()
        self.replies, self._unread = self.process.stdout, b""
        self._requests = Connection(os.dup(self.process.stdin.fileno()), readable=False)
        self.process.stdin.close()
        self._tell(data)

    def _tell(self, message: object) -> None:
        self.printed.end_call()
        with contextlib.suppress(BrokenPipeError):  # the process has died, and `receive` will report it
            self._requests.send_bytes(encode(message))

    def ask(self, request: int, sample: RewardSample) -> None:
        """Send the process a sample to score, without waiting for the reply. `request` is a unique number."""
        self.request, self.digest = request, sample.digest
        self._tell(Request.of(request, sample))

    def fileno(self) -> int:
        """Return the file descriptor of the pipe of replies, so that `wait` accepts a worker."""
        return self.replies.fileno()

    def wait_until_ready(self) -> None:
        if not wait([self], _START_S):
            raise ValueError(
                f"{self._flag} has not loaded within {_START_S:g} s. Move what its file does when it is "
                "loaded into the function, which may take --reward-timeout-s, or use a less busy machine."
            )
        (reply, *strangers) = self.read() or [Reply()]
        if strangers or reply.pid not in (None, self.process.pid):
            raise ValueError(_FORKED_WHILE_LOADED)
        if not reply.ready:
            raise ValueError(
                reply.error or f"the process that loads the reward function {self.cause_of_death()}"
            )

    def receive(self) -> tuple[Reply | None, list[Reply]]:
        """Return the reply to the last request, and the replies that other processes wrote into the pipe.

        The first is None if the process has died or sent a malformed reply.

        Raises: ValueError if the reward function's file forks while it is loaded."""
        own, strangers = None, []
        for reply in self.read():
            if reply.pid != self.process.pid:
                if reply.ready:
                    raise ValueError(_FORKED_WHILE_LOADED)
                strangers.append(reply)
            elif (reply.request, reply.digest) == (self.request, self.digest):
                own = reply if reply.reward is not None or reply.failure is not None else None
        return own, strangers

    def read(self) -> list[Reply]:
        """Return all available replies. Waits for at least one.

        Returns [] if all writers have ended, or if a line is malformed."""
        while not self._unread.endswith(b"\n"):
            if not (more := os.read(self.replies.fileno(), 1 << 16)):
                return []
            self._unread += more
        lines, self._unread = self._unread, b""
        try:
            return read_replies(lines)
        except ValueError:
            return []

    def cause_of_death(self) -> str:
        try:
            self.process.wait(1.0)
        # the process lives, but has closed its end or sent a malformed reply
        except subprocess.TimeoutExpired:
            return "wrote into the pipe that its replies go through, or replied to another request"
        code = self.process.returncode
        return (
            f"died of {signal.Signals(-code).name}"
            if code < 0
            else f"ended its process with exit code {code}"
        )

    def kill(self) -> None:
        """Kill the process and its children in its process group. A second call does nothing."""
        if self.replies.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.printed.close()
        self.replies.close()
        self._requests.close()

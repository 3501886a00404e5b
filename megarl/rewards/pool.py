"""Reward functions in processes of their own, which can be killed: what one of them does to itself costs one reward, not the run.

    with RewardPool(config.data, num_workers=2) as pool:
        probe_reward(pool, dataset)         before training: is there one for every kind of row?
        verdicts = pool.score(samples)      a reward each, or why there is none

A function that raises, returns no finite number, hangs, dies, or asks for too much memory has failed for that sample; the next one gets
a whole process again. The user's file is run in these processes only."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config.schema import DataConfig
from megarl.leaving import LEAVING
from megarl.rewards import load_reward
from megarl.rewards.base import RewardFunction, RewardSample, describe, judge

_LOOK_S = 0.2  # between two looks at whether the job is to end
_START_S = 120.0  # the user's file may import what is slow to import


@dataclass(frozen=True, slots=True)
class Verdict:
    """reward: None if it failed, and then `failure` says why, with the function's traceback if it raised."""

    reward: float | None
    failure: str | None = None


class RewardPool:
    """Processes that judge samples, started at once and again when one had to be killed. Use it on the main thread: the kernel ends
    them with the thread that started them.

    Args:
        num_workers: 0: no processes; the function is called here, for pdb, and nothing limits it.
        data: what to call, and its limits.
    Raises: ValueError if the function cannot be loaded."""

    def __init__(self, data: DataConfig, num_workers: int) -> None:
        self.data = data
        self._function = None if num_workers else load_reward(data)
        self._workers = [_Worker(data) for _ in range(num_workers)]
        try:
            for worker in self._workers:
                worker.wait_until_ready(time.monotonic() + _START_S)
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

    def score(self, samples: Sequence[RewardSample]) -> list[Verdict]:
        """In order. Raises ValueError if the function cannot be loaded again after a process had to be killed."""
        if self._function is not None:
            return [_judge_here(self._function, sample) for sample in samples]
        verdicts: list[Verdict] = [Verdict(None)] * len(samples)
        waiting, idle = deque(range(len(samples))), list(self._workers)
        too_slow = f"took longer than --reward-timeout-s ({self.data.reward_timeout_s:g}) and was killed"
        running: dict[_Worker, tuple[int, float]] = {}  # -> sample, and when it is over
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and idle:
                    worker, index = idle.pop(), waiting.popleft()
                    worker.send(samples[index])
                    running[worker] = index, time.monotonic() + self.data.reward_timeout_s
                    selector.register(worker.replies, selectors.EVENT_READ, worker)
                first = min(deadline for _, deadline in running.values())
                ready = {
                    key.data for key, _ in selector.select(min(_LOOK_S, max(0.0, first - time.monotonic())))
                }
                LEAVING.check()
                now = time.monotonic()
                for worker, (index, deadline) in list(running.items()):
                    if worker not in ready and now < deadline:
                        continue
                    selector.unregister(worker.replies)
                    del running[worker]
                    verdict = worker.receive() if worker in ready else None
                    if verdict is None:
                        who = describe(
                            self.data.reward_function or self.data.reward or "auto", samples[index]
                        )
                        verdict = Verdict(
                            None, f"{who} {worker.cause_of_death() if worker in ready else too_slow}"
                        )
                        worker = self._restart(worker)
                    verdicts[index] = verdict
                    idle.append(worker)
        return verdicts

    def _restart(self, worker: _Worker) -> _Worker:
        worker.kill()
        new = _Worker(self.data)
        self._workers[self._workers.index(worker)] = new
        new.wait_until_ready(time.monotonic() + _START_S)
        return new


def _judge_here(function: RewardFunction, sample: RewardSample) -> Verdict:
    try:
        return Verdict(judge(function, sample))
    except ValueError as error:
        return Verdict(None, str(error))


def probe_reward(pool: RewardPool, dataset: Sequence[Any], flag: str = "--train-data") -> None:
    """Judge before training starts, so that a broken function is found while nothing is lost yet.

    The first row of every data source is judged twice: for an empty response, and for its ground truth as the response.

    Args:
        dataset: rows with `data_source`, `ground_truth` and `extra_info` (a PromptDataset).
    Raises: ValueError with the first failure.
    """
    first_rows: dict[str, int] = {}
    for index in range(len(dataset)):
        first_rows.setdefault(dataset[index].data_source, index)
    for index in first_rows.values():
        row = dataset[index]
        responses = dict.fromkeys(("", row.ground_truth or ""))
        for verdict in pool.score(
            [RewardSample(row.data_source, text, row.ground_truth, row.extra_info) for text in responses]
        ):
            if verdict.failure is not None:
                raise ValueError(f"before training, on row {index} (from 0) of {flag}: {verdict.failure}")


class _Worker:
    """One process: pool_worker.py. Requests go to it as pickles, answers come as JSON: what it says is not trusted."""

    def __init__(self, data: DataConfig) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megarl.rewards.pool_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.replies = self.process.stdout
        self.send(data)

    def send(self, request: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died, and `receive` will say so
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()

    def wait_until_ready(self, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            answer = (
                self._answer()
                if selector.select(max(0.0, deadline - time.monotonic()))
                else {"error": f"does not load within {_START_S:g} s"}
            )
        if answer.get("ready") is not True:
            raise ValueError(
                str(
                    answer.get("error")
                    or f"the process that loads the reward function {self.cause_of_death()}"
                )
            )

    def receive(self) -> Verdict | None:
        """What it says of the sample that it was sent last; None if it has died or talks nonsense."""
        answer = self._answer()
        reward, failure = answer.get("reward"), answer.get("failure")
        if isinstance(reward, float):
            return Verdict(reward)
        if isinstance(failure, str):
            return Verdict(None, failure)
        return None

    def _answer(self) -> dict[str, object]:
        """{} if it has died, or what it wrote is no answer."""
        try:
            answer = json.loads(self.replies.readline() or "{}")
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def cause_of_death(self) -> str:
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:  # it lives, and has closed its end or written nonsense
            return "wrote into the pipe that its answers go through"
        code = self.process.returncode
        return (
            f"died of {signal.Signals(-code).name}"
            if code < 0
            else f"ended its process with exit code {code}"
        )

    def kill(self) -> None:
        """It and what it has started in its group. A second time this does nothing."""
        if self.replies.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.replies.close()
        with contextlib.suppress(BrokenPipeError):  # of a request that was never read
            self.process.stdin.close()

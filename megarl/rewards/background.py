"""Score samples on a thread of their own, before anybody asks for their rewards.

    pool = BackgroundPool(config.data, num_workers=2)
    pool.begin(samples)                 returns at once
    verdicts = pool.finish(samples)     waits for the rewards of these samples

A sample gets the reward that a `RewardPool` gives it, only at another time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from megarl.config.schema import DataConfig
from megarl.rewards.base import RewardSample
from megarl.rewards.pool import RewardPool, Verdict
from megarl.runtime.abort import ABORT, Aborted


@dataclass(eq=False)
class _Job:
    """A sample to score once, and the future of its verdict."""

    sample: RewardSample
    verdict: Future[Verdict] = field(default_factory=Future)
    is_taken: bool = False
    """Whether the thread has given the sample to the pool."""


class BackgroundPool:
    """A RewardPool on a thread, which makes and uses it alone, because the kernel ends the pool's processes
    with the thread that started them.

    Args:
        num_workers: number of processes, at least 1.
    Raises: ValueError if the reward function cannot be loaded."""

    def __init__(self, data: DataConfig, num_workers: int) -> None:
        self._changed = threading.Condition()
        self._urgent: deque[list[_Job]] = deque()  # batches that somebody waits for
        self._early: deque[list[_Job]] = deque()
        self._begun: dict[int, _Job] = {}  # by sample id, until somebody asks for the reward
        self._is_closed = False
        started: Future[None] = Future()
        # A daemon, so that a rank that fails can end without waiting for a slow reward function.
        self._thread = threading.Thread(
            target=self._run, args=(data, num_workers, started), name="rewards", daemon=True
        )
        self._thread.start()
        started.result()

    def begin(self, samples: Sequence[RewardSample]) -> None:
        """Queue samples whose rewards `finish` returns later. Returns at once."""
        jobs = [_Job(sample) for sample in samples]
        self._begun |= {job.sample.sample_id: job for job in jobs}
        self._queue(self._early, jobs)

    def finish(self, samples: Sequence[RewardSample]) -> list[Verdict]:
        """Return the `Verdict` of each sample in order, also of samples without a `begin`.

        Samples that wait for their turn go before those that nobody asks for.

        Raises: ValueError if the function cannot be loaded again after a process had to be killed; Aborted if
            the job shuts down."""
        return self._wait([self._begun.pop(sample.sample_id, None) or _Job(sample) for sample in samples])

    def score(self, samples: Sequence[RewardSample]) -> list[Verdict]:
        """Return the `Verdict` of each sample in order. Samples of `begin` are other samples, even if their
        ids are the same.

        Raises: as `finish`."""
        return self._wait([_Job(sample) for sample in samples])

    def _wait(self, jobs: list[_Job]) -> list[Verdict]:
        self._queue(self._urgent, jobs)
        return [job.verdict.result() for job in jobs]

    def close(self) -> None:
        """End the processes and the thread, also while a sample is being scored."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _queue(self, queue: deque[list[_Job]], jobs: list[_Job]) -> None:
        with self._changed:
            queue.append(jobs)
            self._changed.notify()

    def _run(self, data: DataConfig, num_workers: int, started: Future[None]) -> None:
        try:
            pool = RewardPool(data, num_workers, self._check)
        except BaseException as error:  # thread boundary: raised in the constructor
            started.set_exception(error)
            return
        started.set_result(None)
        with pool:
            while (jobs := self._next(pool.num_calls)) is not None:
                try:
                    verdicts = pool.score([job.sample for job in jobs])
                except BaseException as error:  # thread boundary: raised where the rewards are wanted
                    for job in jobs:
                        job.verdict.set_exception(error)
                else:
                    for job, verdict in zip(jobs, verdicts, strict=True):
                        job.verdict.set_result(verdict)

    def _next(self, num_calls: int) -> list[_Job] | None:
        """Wait for a batch with samples that are not scored yet, and return these. None after `close`.

        Args:
            num_calls: number of samples that can be scored at a time."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._is_closed or self._urgent or self._early)
                if self._is_closed:
                    return None
                queue = self._urgent or self._early
                batch = queue.popleft()
                while queue and len(batch) <= num_calls:
                    batch = batch + queue.popleft()
                if jobs := [job for job in batch if not job.is_taken]:
                    for job in jobs:
                        job.is_taken = True
                    return jobs

    def _check(self) -> None:
        """Raise Aborted if the pool is closed or the job shuts down."""
        if self._is_closed:
            raise Aborted
        ABORT.check()

"""The engine's scheduler, counting what it did: proof that a test went the way it means to test."""

from __future__ import annotations

from collections import Counter

from megarl.rollout.scheduler import DecodeScheduler

COUNTS: Counter[str] = Counter()


class CountingScheduler(DecodeScheduler):
    def schedule(self, throttle_prefills: bool = False):
        output = super().schedule(throttle_prefills)
        COUNTS["short" if output is self._short_output else "long"] += 1
        return output

    def _preempt_request(self, *args, **kwargs) -> None:
        COUNTS["preempted"] += 1
        super()._preempt_request(*args, **kwargs)

"""Let a rank take steps of its engines while no call of the driver waits.

Requests of an earlier call go on then, also between the calls of a training step on the same rank. The ranks of
one tensor-parallel engine take each step together, so they agree before each step whether to take it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from megarl.runtime.abort import Aborted


class SteppedEngine(Protocol):
    """The methods of a role with an engine that takes steps between calls."""

    def has_unfinished(self) -> bool:
        """Return whether the engine has unfinished requests, the same on all of its ranks."""

    def is_held(self) -> bool:
        """Return whether the engine must not take a step now, as far as this rank knows."""

    def step(self) -> None:
        """Take one step, and report what has finished."""


class EngineSteps:
    """The idle hook of a rank (see `hosting.IdleHook`) that takes steps of all of the rank's engines.

    Args:
        group: gloo process group of the ranks that step together; None for one rank."""

    role, method = "rollout", "generate"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._is_aborted = group, False
        self._engines: list[SteppedEngine] = []
        self._ready: list[SteppedEngine] = []  # engines that take the next step

    def add(self, engine: SteppedEngine) -> None:
        self._engines.append(engine)

    def agree(self, value: bool) -> bool:
        """Return whether some rank wants to stop, or whether no engine can take a step. Collective over the
        ranks that step together."""
        busy = [engine for engine in self._engines if engine.has_unfinished()]
        if not busy or self._is_aborted:
            return True
        held = [value, *(engine.is_held() for engine in busy)]
        if self._group is not None:
            flags = torch.tensor(held, dtype=torch.int32)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
            held = flags.bool().tolist()
        self._ready = [engine for engine, is_held in zip(busy, held[1:], strict=True) if not is_held]
        return held[0] or not self._ready

    def step(self) -> bool:
        """Take one step of each engine that can. Returns False if the job shuts down."""
        try:
            for engine in self._ready:
                engine.step()
        except Aborted:
            self._is_aborted = True
        return not self._is_aborted

"""Decide which parts of this rank's models (parameters, gradients, optimizer) and of its engine (KV cache)
are on its GPU during which call.

during a call
    The device has the parts that the call needs. It starts to load the parts that the next call needs, as far
    as --offload-ahead-bytes allows. All other parts that may be offloaded (--offload) are in host memory.
between calls
    Everything stays where it is.

A part is offloaded when a call begins that does not need it. Consecutive calls that need the same parts move
nothing, so each part is copied out and back once per phase of its role. Calls that declare nothing
(exchanges, rewards, advantages) leave all parts where they are.

The manager predicts the next call from earlier calls, because every step runs the same flow. It expects the
call that followed the last two calls before, or else the call that followed the last one. A wrong guess, as
at an evaluation, costs copies only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from megarl.config.role_sections import OFFLOAD_PARTS
from megarl.role_names import kind_and_suffix

KV_CACHE = "kv_cache"
"""The one part of an in-process engine that can leave the device."""


class DeviceMemory(Protocol):
    """Memory of a model (megarl/megatron/offload.py) or of an engine (megarl/workers/kv_cache.py)."""

    def offload(self, parts: Collection[str]) -> None: ...

    def load(self, parts: Collection[str]) -> None: ...

    def part_bytes(self, part: str) -> int: ...

    def resident_bytes(self, part: str | None = None) -> int: ...

    def unallocated_bytes(self) -> int: ...

    def take_copy_seconds(self) -> float: ...


_Call = tuple[str | None, frozenset[str]]
"""The role whose parts a call needs, and the parts."""


@dataclass
class _Model:
    memory: DeviceMemory
    offloaded_parts: frozenset[str]
    """Parts that may be offloaded."""
    least_bytes: int


class OffloadManager:
    """Moves the parts of a process's models between GPU and host memory, as the calls of roles need them."""

    def __init__(self, ahead_bytes: int = 0) -> None:
        """Start without models. `ahead_bytes` limits the bytes loaded before the call that needs them."""
        self._models: dict[str, _Model] = {}
        self._ahead_bytes = ahead_bytes
        self._recent: tuple[_Call, ...] = ()
        self._followed: dict[tuple[_Call, ...], _Call] = {}
        self.peak_bytes = 0
        """Largest number of bytes that the parts of all models had on the device together.

        Activations and engines are not counted, but for a KV cache that is released."""

    def add(self, role: str, memory: DeviceMemory, offloaded_parts: Collection[str]) -> None:
        """Take charge of a model or an engine that was just built, with all of its parts on the device."""
        self._models[role] = _Model(memory, frozenset(offloaded_parts), memory.resident_bytes())
        self.note_peak()

    def remove(self, role: str) -> None:
        """Forget a model that is being freed."""
        self._models.pop(role, None)

    def enter(self, role: str | None, parts: Collection[str]) -> None:
        """Offload what the coming call does not need, load the parts of the role's model that it needs, and
        start to load the next call's."""
        if parts == (KV_CACHE,) and role not in self._models:
            role, parts = None, ()  # the engine keeps its KV cache
        call = role, frozenset(parts)
        self._followed |= {self._recent: call, self._recent[-1:]: call}
        self._recent = *self._recent[-1:], call
        next_role, ahead = self._ahead(call)
        for name, model in self._models.items():
            needed = (parts if name == role else (), ahead if name == next_role else ())
            model.memory.offload(model.offloaded_parts.difference(*needed))
        for name, wanted in ((role, parts), (next_role, ahead)):
            if name in self._models:
                self._models[name].memory.load(wanted)
        for model in self._models.values():
            model.least_bytes = min(model.least_bytes, model.memory.resident_bytes())
        self.note_peak()

    def _ahead(self, call: _Call) -> tuple[str | None, list[str]]:
        """Predict the next call. Returns its role and the parts to load before it begins; (None, []) if
        nothing is known.

        Gradients are never loaded ahead: they come back as zeros, at no cost."""
        role, parts = self._followed.get(self._recent) or self._followed.get(self._recent[-1:], (None, ()))
        if role not in self._models:
            return None, []
        model, ahead, room = self._models[role], [], self._ahead_bytes
        for part in OFFLOAD_PARTS:
            if (
                part != "gradients"
                and part in parts
                and part in model.offloaded_parts
                and not (role == call[0] and part in call[1])
            ):
                room -= model.memory.part_bytes(part)
                if room < 0:
                    break
                ahead.append(part)
        return role, ahead

    def growth_until_rollout(self) -> int:
        """Return how many more bytes the models will hold on the device during a rollout after an update than
        now: the optimizer's state that is not allocated yet, less the parts that will be offloaded."""
        growth = 0
        for model in self._models.values():
            growth -= sum(model.memory.resident_bytes(part) for part in model.offloaded_parts)
            if "optimizer" not in model.offloaded_parts:
                growth += model.memory.unallocated_bytes()
        return growth

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes())

    def resident_bytes(self) -> int:
        return sum(model.memory.resident_bytes() for model in self._models.values())

    def take_metrics(self, role: str, with_time: bool) -> dict[str, float]:
        """Return this rank's memory and copy-time metrics since the last call of this function; {} in a job
        without offload.

        memory/<kind>_resident_bytes is the least number of bytes that this role had on the device, while
        other roles worked. time/offload_s, if `with_time`, covers all roles of the rank."""
        if not any(model.offloaded_parts - {KV_CACHE} for model in self._models.values()):
            return {}
        model = self._models[role]
        metrics = {f"memory/{kind_and_suffix(role)[0]}_resident_bytes": float(model.least_bytes)}
        model.least_bytes = model.memory.resident_bytes()
        if with_time:
            metrics["time/offload_s"] = sum(
                model.memory.take_copy_seconds() for model in self._models.values()
            )
        return metrics


def needs(*parts: str, of: str | None = None) -> Callable[[Callable], Callable]:
    """Make a role's method load these parts of its model (parameters, gradients, optimizer) or engine
    (kv_cache) to the device first. Use as a decorator.

        @needs("parameters")
        def log_probs(self): ...

    A method that needs only free memory declares `@needs()`. The role has an attribute `offload_manager`, and
    a name if it has a model.

    Args:
        of: attribute that holds another role, whose model is meant. If that role is None, the call needs no
            parts."""

    def declare(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(self, *args: object, **kwargs: object) -> object:
            role = self if of is None else getattr(self, of)
            self.offload_manager.enter(role.name if parts and role is not None else None, parts)
            try:
                return method(self, *args, **kwargs)
            finally:
                self.offload_manager.note_peak()

        call.needs = parts
        return call

    return declare

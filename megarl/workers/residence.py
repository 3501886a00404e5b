"""Which parts of this rank's models are on its device during which call.

    during a call    of what may be offloaded (--offload) the device has what the call needs, of its role, and of what the next call
                     needs as much as --offload-ahead-bytes allows, on its way while this one computes;
                     nothing else
    between calls    everything stays where it is

So a part leaves when a call begins that does without it, and calls in a row that need the same move nothing:
each part makes one way out and one back per phase of its role. Calls that declare nothing (exchanges,
rewards, advantages) leave all as it is.

The next call is the one that followed the last two, or else the last one, before: the same flow is run in the
same way in every step. A guess that is wrong, as at an evaluation, costs copies only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.role_sections import OFFLOAD_PARTS
from megarl.role_names import kind_and_suffix

if TYPE_CHECKING:
    from megarl.megatron.offload import ModelMemory


_Call = tuple[str | None, frozenset[str]]
"""The role whose parts a call needs, and these."""


@dataclass
class _Resident:
    memory: ModelMemory
    may_leave: frozenset[str]
    least_bytes: int


class Residence:
    """The models of one process."""

    def __init__(self, ahead_bytes: int = 0) -> None:
        """ahead_bytes: of the next call's parts, on the device beyond what the running call needs."""
        self._residents: dict[str, _Resident] = {}
        self._ahead_bytes = ahead_bytes
        self._recent: tuple[_Call, ...] = ()
        self._followed: dict[tuple[_Call, ...], _Call] = {}
        self.peak_bytes = 0
        """Most that the parts of all models had on the device together; activations and engines are not
        counted."""

    def add(self, role: str, memory: ModelMemory, may_leave: Collection[str]) -> None:
        """A model that was just built, all of it on the device."""
        self._residents[role] = _Resident(memory, frozenset(may_leave), memory.resident_bytes())
        self.note_peak()

    def enter(self, role: str | None, parts: Collection[str]) -> None:
        """Make the device ready for a call that needs these parts of a role's model, and begin with what the
        next one needs."""
        call = role, frozenset(parts)
        self._followed |= {self._recent: call, self._recent[-1:]: call}
        self._recent = *self._recent[-1:], call
        next_role, ahead = self._ahead(call)
        for name, resident in self._residents.items():
            resident.memory.offload(
                resident.may_leave.difference(
                    parts if name == role else (), ahead if name == next_role else ()
                )
            )
        for name, wanted in ((role, parts), (next_role, ahead)):
            if name in self._residents:
                self._residents[name].memory.load(wanted)
        for resident in self._residents.values():
            resident.least_bytes = min(resident.least_bytes, resident.memory.resident_bytes())
        self.note_peak()

    def _ahead(self, call: _Call) -> tuple[str | None, list[str]]:
        """The role of the next call, and what of its parts may be on the device already. Gradients come back
        as zeros, in no time."""
        role, parts = self._followed.get(self._recent) or self._followed.get(self._recent[-1:], (None, ()))
        if role not in self._residents:
            return None, []
        resident, ahead, room = self._residents[role], [], self._ahead_bytes
        for part in OFFLOAD_PARTS:
            if (
                part != "gradients"
                and part in parts
                and part in resident.may_leave
                and not (role == call[0] and part in call[1])
            ):
                room -= resident.memory.part_bytes(part)
                if room < 0:
                    break
                ahead.append(part)
        return role, ahead

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes())

    def resident_bytes(self) -> int:
        return sum(resident.memory.resident_bytes() for resident in self._residents.values())

    def take_metrics(self, role: str, with_time: bool) -> dict[str, float]:
        """What this rank contributes since it was asked last; {} in a job without offload.

        memory/<kind>_resident_bytes: the least of this role that was on the device, which is what it left
        there while others worked. time/offload_s, of all roles of the rank, if `with_time`."""
        if not any(resident.may_leave for resident in self._residents.values()):
            return {}
        resident = self._residents[role]
        metrics = {f"memory/{kind_and_suffix(role)[0]}_resident_bytes": float(resident.least_bytes)}
        resident.least_bytes = resident.memory.resident_bytes()
        if with_time:
            metrics["time/offload_s"] = sum(
                resident.memory.take_copy_seconds() for resident in self._residents.values()
            )
        return metrics


def needs(*parts: str, of: str | None = None) -> Callable[[Callable], Callable]:
    """Declare what a role's method needs on the device: parts of its model, or of the role that its attribute
    `of` holds (None: of none).

        @needs("parameters")
        def log_probs(self): ...

    A method that needs nothing but room says `@needs()`. The role has a `plane`, and a name where it has a
    model."""

    def declare(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(self, *args: object, **kwargs: object) -> object:
            role, residence = self if of is None else getattr(self, of), self.plane.residence
            residence.enter(role.name if parts and role is not None else None, parts)
            try:
                return method(self, *args, **kwargs)
            finally:
                residence.note_peak()

        return call

    return declare

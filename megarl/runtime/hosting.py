"""Hold the role objects of one rank and run the driver's calls on them, however messages are transported.

This module has the roles, the context that they are built with, and the idle hook. An executor's worker loop
makes a WorkerContext, builds the roles with it and passes every call to `HostedRoles.run`."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

from megarl.ranges import call_ranges
from megarl.runtime.abort import ABORT, AbortToken
from megarl.runtime.messages import Call, CannotSend, Event, Reply, decode_arguments, encode


class IdleHook(Protocol):
    """Work that a rank does while no call of the driver waits, for example the steps of an engine.

    Ranks that step together (the ranks of one engine) register the hook in the same call. They take the same
    number of steps before each command."""

    role: str
    """Role and method that a failure of the work is reported for."""
    method: str

    def agree(self, value: bool) -> bool:
        """Return the same value on every rank that steps together, the `value` of one of them. Collective
        over these ranks.

        A single rank returns `value`."""

    def step(self) -> bool:
        """Take one step. Returns False if nothing is left to do before the driver's next call.

        The result is the same on all ranks that step together."""


class WorkerContext:
    """The services of a rank for the roles that it hosts: its number, events to the driver, the abort token
    and the idle hook.

    Args:
        rank: rank of this process in the job.
        send_event: hands an event to the driver; called from any thread, one at a time.
        abort: holds whether the calls of this rank are to be aborted."""

    def __init__(self, rank: int, send_event: Callable[[Event], None], abort: AbortToken = ABORT) -> None:
        self.rank, self.abort = rank, abort
        self.idle_hook: IdleHook | None = None
        """Hook set by a role during a call, on all ranks that step together; None lets the rank wait."""
        self._send_event, self._lock = send_event, threading.Lock()

    def emit(self, name: str, payload: object = None) -> None:
        """Send an event to the driver now, from any thread. Raises CannotSend if no message can hold the
        payload.

        Events of a rank arrive in the order of their `emit`. They arrive before the value of the call that
        has emitted them.

        Raises: CannotSend."""
        try:
            encode(payload)
        except CannotSend as error:
            raise CannotSend(f"event {name} of rank {self.rank} cannot be sent: {error}") from None
        with self._lock:
            self._send_event(Event(self.rank, name, payload))


BuildRoles = Callable[[WorkerContext], Mapping[str, object]]
Roles = Mapping[str, object] | BuildRoles
"""Role name -> object whose methods the driver calls, for the roles of this rank.

A function that builds the roles is also allowed. An error in this function is reported as any other."""


class HostedRoles:
    """The role objects of one rank by name, on which the driver's calls run."""

    def __init__(self, roles: Mapping[str, object], rank: int) -> None:
        self.by_name, self._rank = dict(roles), rank

    def run(self, call: Call, index: int) -> Reply:
        """Run a call of the driver on this rank's role, and return the encoded value and its time. Errors of
        the method are raised.

        Raises: the error of the method; TypeError for arguments or a result that no message can hold."""
        if call.role not in self.by_name:
            hosted = sorted(self.by_name)
            raise ValueError(f"role {call.role!r} is not on rank {self._rank}, which hosts {hosted}.")
        with call_ranges(call.role, call.method, call.label):
            start = time.perf_counter()
            method = getattr(self.by_name[call.role], call.method)
            bound = decode_arguments(method, call.arguments)
            value = method(*bound.args, **bound.kwargs)
            try:
                encoded = encode(value)
            except CannotSend as error:
                raise CannotSend(f"its result ({type(value).__name__}) cannot be sent: {error}") from None
            seconds = time.perf_counter() - start
        return Reply(index, self._rank, encoded, seconds, time.time())


def step_until(hook: IdleHook | None, has_command: Callable[[], bool], label: str | None = None) -> None:
    """Take steps of the idle hook until a command of the driver waits or nothing is left to do.

    Args:
        label: label of the last call, which a profiler records."""
    if hook is None:
        return
    with call_ranges(hook.role, hook.method, label):
        while not hook.agree(has_command()):
            if not hook.step():
                return


def stack_of_call(thread: threading.Thread, others: tuple[str, ...] = ()) -> str:
    """Return the Python stack of a thread of this rank as text, from the role's method down.

    Stacks of the threads named in `others` are appended. Needs the GIL, which every wait in torch or gloo
    releases."""
    running = sys._current_frames()
    frames = traceback.extract_stack(running.get(thread.ident or 0))
    inside = [i for i, frame in enumerate(frames) if frame.name == "run" and frame.filename == __file__]
    text = "".join(traceback.format_list(frames[inside[-1] + 1 if inside else 0 :])).rstrip()
    for other in threading.enumerate():
        frame = running.get(other.ident or 0)
        if other.name in others and frame is not None:
            text += f"\nin its thread {other.name}:\n" + "".join(traceback.format_stack(frame)).rstrip()
    return text

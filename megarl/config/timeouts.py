"""How long ranks wait for each other."""

from __future__ import annotations

from datetime import timedelta

_DRIVER_FIRST_S = 60.0
"""A rank waits this much longer than a call may take. The driver, which may have started later, then speaks
first: it knows who hangs."""


def group_timeout(call_timeout_s: float) -> timedelta:
    """Longest wait in a collective of a job whose calls may take `call_timeout_s`.

    Every process group is made with it."""
    return timedelta(seconds=call_timeout_s + _DRIVER_FIRST_S)

"""The seconds that the phases of a step took, as metrics."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.flow import declaration


def phase_times(seconds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Return `time/<phase>_s` from `Executor.take_seconds()`. Calls without a phase of their own, and those
    that no role class declares, add up to `time/other_s`.

    Each is the time on the rank where the call took longest. Calls on disjoint ranks overlap, so phases may
    add up to more than `time/step_s`; where nothing overlaps, what is missing from it is the driver and the
    messages. Several of a kind add up.
    """
    times: dict[str, float] = {}
    for (role, method), value in seconds.items():
        declared = declaration(role, method)
        name = f"time/{declared.phase if declared else 'other'}_s"
        times[name] = times.get(name, 0.0) + value
    return times

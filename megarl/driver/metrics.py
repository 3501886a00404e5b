"""The seconds that the phases of a step took, as metrics."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.role_names import kind_and_suffix

PHASE_OF_CALL = {
    ("rollout", "generate"): "rollout",
    ("reward", "score"): "reward",
    ("actor", "log_probs"): "log_probs",
    ("reference", "log_probs"): "ref_log_probs",
    ("reward_model", "score"): "reward_model",
    ("critic", "values"): "values",
    ("critic", "update"): "critic_update",
    ("actor", "update"): "update",
    ("rollout", "sync"): "reshard",
}


def phase_times(seconds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """`time/<phase>_s` from `Executor.take_seconds()`. All calls that are no phase of their own add up to
    `time/other_s`.

    Each is the time on the rank where the call took longest. Calls on disjoint ranks overlap, so phases may
    add up to more than `time/step_s`; where nothing overlaps, what is missing from it is the driver and the
    messages. Several of a kind add up.
    """
    times: dict[str, float] = {}
    for (role, method), value in seconds.items():
        name = f"time/{PHASE_OF_CALL.get((kind_and_suffix(role)[0], method), 'other')}_s"
        times[name] = times.get(name, 0.0) + value
    return times

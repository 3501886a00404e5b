"""The log-prob gate: trainer and engine must give the sampled tokens the same log-probabilities.

If they do not, training goes on without any error and is silently wrong: stale or misplaced weights, another
temperature, dropout, labels off by one, padded vocabulary in one softmax and not in the other."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.gate_limits import GateLimits


class GateError(RuntimeError):
    """Trainer and engine disagree."""

    def __init__(self, finding: str, worst_tokens: list[dict[str, float]]) -> None:
        worst_tokens = sorted(worst_tokens, key=lambda t: -abs(t["trainer"] - t["engine"]))[:5]
        rows = [
            f"  sample {t['sample_id']}, token {t['token']} at position {t['position']}: trainer "
            f"{t['trainer']:.9g}, "
            f"engine {t['engine']:.9g}, difference {t['trainer'] - t['engine']:.3g}"
            for t in worst_tokens
        ]
        super().__init__("\n".join([finding, *rows]))


def exceeded(mismatch: Mapping[str, float], limits: GateLimits) -> list[str]:
    """Return the statistics of a step that are above what is accepted, or not finite.

    Args:
        mismatch: metrics of the step that `ActorRole.log_probs` returns, each with the prefix mismatch/."""
    values = {name: mismatch[f"mismatch/{name}"] for name in limits.accepted(mismatch)}
    return [
        name
        for name, limit in limits.accepted(mismatch).items()
        if not (values[name] <= limit and math.isfinite(values[name]))
    ]


def gate_finding(mismatch: Mapping[str, float], limits: GateLimits) -> str | None:
    """Return what is wrong with the differences |trainer log-prob - engine log-prob| of a step, or None.

    Args:
        mismatch: as of `exceeded`."""
    above = exceeded(mismatch, limits)
    if not above:
        return None
    statistics = [
        f"  mismatch/{name} {mismatch[f'mismatch/{name}']:.9g}, accepted "
        f"{limit:.9g}{': TOO LARGE' if name in above else ''}"
        for name, limit in limits.accepted(mismatch).items()
    ]
    rule = (
        f"  accepted by the rule {limits.describe()}; mean log-prob "
        f"-{mismatch['mismatch/log_prob_abs']:.4g}. "
        "--gate-mean-abs and --gate-max-abs replace the rule."
    )
    return "\n".join([_DISAGREE.format(mismatch["mismatch/tokens"]), *statistics, rule])


_DISAGREE = (
    "trainer and engine disagree on {:.0f} sampled tokens by more than rounding. Training would be "
    "silently wrong. Is dropout on, "
    "a weight not synchronised, or an engine argument changing the distribution?"
)

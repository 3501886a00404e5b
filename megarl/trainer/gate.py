"""Check with the log-prob gate that trainer and engine give the sampled tokens equal log-probabilities.

Without the gate a disagreement raises no error, and training is silently wrong. Typical causes are stale or
misplaced weights, another temperature, dropout, labels off by one, and padded vocabulary in one softmax but
not in the other."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.failures import ExplainedError
from megarl.gate_limits import GateLimits
from megarl.futures import Future
from megarl.runtime.executor import Executor
from megarl.flow import Actor, Metrics
from megarl.metrics import combine
from megarl.trainer.actor_state import ActorState
from megarl.trainer.state import TrainState


class GateError(ExplainedError, RuntimeError):
    """Trainer and engine disagree on the log-probs of sampled tokens."""

    read_on = "docs/debugging.md, section The gate"

    def __init__(self, error: str, worst_tokens: list[dict[str, float]]) -> None:
        worst_tokens = sorted(worst_tokens, key=lambda t: -abs(t["trainer"] - t["engine"]))[:5]
        rows = [
            f"  sample {t['sample_id']}, token {t['token']} at position {t['position']}: trainer "
            f"{t['trainer']:.9g}, engine {t['engine']:.9g}, difference {t['trainer'] - t['engine']:.3g}"
            for t in worst_tokens
        ]
        super().__init__("\n".join([error, *rows]))


def exceeded(mismatch: Mapping[str, float], limits: GateLimits) -> list[str]:
    """Return the names of the log-prob statistics of a step that are above their limits or not finite, e.g.
    "mean_abs".

    Args:
        mismatch: metrics of the step that `ActorRole.log_probs` returns, each with the prefix mismatch/."""
    return [
        name
        for name, limit in limits.accepted(mismatch).items()
        if not (math.isfinite(value := mismatch[f"mismatch/{name}"]) and value <= limit)
    ]


def gate_error(mismatch: Mapping[str, float], limits: GateLimits) -> str | None:
    """Return the error message if a step's differences |trainer log-prob - engine log-prob| are too large,
    else None.

    Args:
        mismatch: as in `exceeded`."""
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
        f"-{mismatch['mismatch/log_prob_abs']:.4g}. --gate-mean-abs and --gate-max-abs replace the rule."
    )
    return "\n".join([_DISAGREE.format(mismatch["mismatch/tokens"]), *statistics, rule])


class LogProbGate:
    """Compares trainer and engine before an actor's first update and at the end of every step.

    Args:
        state: the actors with their limits and whether they have passed.
    """

    def __init__(self, executor: Executor, state: TrainState) -> None:
        self._executor, self._state = executor, state

    def check_first(self, log_probs: Future[Metrics]) -> None:
        """Raise GateError if an actor's `log_probs` disagree with the engine's. Does nothing for an actor
        that has passed the gate in this run.

        Without a token of the current weights (--staleness) there is nothing to judge, and the actor has not
        passed."""
        actor = self._state.actor_of(log_probs.role)
        if not actor.gate_passed and (mismatch := combine(log_probs.result()))["mismatch/tokens"]:
            self.check(actor, mismatch)
            actor.gate_passed = True

    def check(self, actor: ActorState, mismatch: Mapping[str, float]) -> None:
        """Raise GateError, with the worst tokens, if a step's log-probs of trainer and engine differ too
        much."""
        if (error := gate_error(mismatch, actor.gate_limits)) is not None:
            answers = Actor(self._executor, actor.actor).worst_tokens(5).result()
            worst = [token for of_rank in answers for token in of_rank]
            raise GateError(f"{actor.actor}: {error}" if actor.suffix else error, worst)


_DISAGREE = (
    "trainer and engine disagree on {:.0f} sampled tokens by more than rounding. Training would be silently "
    "wrong. Is dropout on, a weight not synchronised, or an engine argument changing the distribution?"
)

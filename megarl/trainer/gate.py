"""Check with the log-prob gate that trainer and engine give the sampled tokens equal log-probabilities.

Without the gate a disagreement raises no error, and training is silently wrong. Typical causes are stale or
misplaced weights, another temperature, dropout, labels off by one, and padded vocabulary in one softmax but
not in the other."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.failures import ExplainedError
from megarl.gate_limits import gate_error
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

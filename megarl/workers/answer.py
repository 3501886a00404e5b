"""Describe a response that an engine samples, in synchronous training and with requests that outlive a call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.invariants import digest
from megarl.workers.store import RolloutSample

if TYPE_CHECKING:
    from megarl.rollout.engine import Response
    from megarl.rollout.interface import Output

LAST_TURN = -1
"""Stands for the number of an episode's last turn, and for that of an answer outside of episodes."""
GREEDY = {"temperature": 0.0}
"""Sampling parameters of greedy answers, in place of those of the others."""


@dataclass(frozen=True)
class Answer:
    """A response that is being sampled: its ids, its prompt, and the tokens that it has so far."""

    sample_id: int
    row: int
    group: int
    prompt: list[int]
    key: int
    """Key of its random draws, see megarl/rollout/draws.py."""
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token of `response`."""
    purpose: str = "train"
    """Name of the data set of the row: "train", or "eval" for a held-out episode."""
    greedy: bool = False
    """Whether the tokens are drawn at temperature 0, and not trained on."""
    turn: int = LAST_TURN
    """Number of the turn in its episode."""

    def after(self, output: Output | Response) -> Answer:
        """Return the answer, extended by the tokens of an output that continues it."""
        return replace(
            self,
            response=[*self.response, *output.token_ids],
            log_probs=[*self.log_probs, *output.log_probs],
            versions=[*self.versions, *output.versions],
        )

    def first(self, number: int) -> Answer:
        """Return the answer with its first `number` tokens only."""
        return replace(
            self,
            response=self.response[:number],
            log_probs=self.log_probs[:number],
            versions=self.versions[:number],
        )

    def sample(
        self, finish_reason: str, holes: tuple[tuple[int, int], ...] = (), **more: Any
    ) -> RolloutSample:
        """Return the sample of a finished answer, or of a conversation with these holes.

        Args:
            more: further fields of the sample."""
        return RolloutSample(
            self.sample_id,
            self.row,
            group=self.group,
            versions=self.versions,
            prompt=self.prompt,
            response=self.response,
            log_probs=self.log_probs,
            truncated=finish_reason == "length",
            digest=digest(self.prompt, self.response, holes),
            holes=holes,
            trained=not self.greedy,
            **more,
        )

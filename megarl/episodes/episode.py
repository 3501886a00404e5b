"""Define an episode: one attempt of the model at one row, in one or several turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.episodes.chat import Message
from megarl.episodes.session import Session


FINISH_REASONS = ("stop", "turns", "context", "env")
"""Why an episode has ended: its environment said so, one of two limits, or it has failed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on answers and tokens that end an episode, unless its environment ends it before."""

    max_turns: int
    """Answers of the model."""
    max_response_length: int
    """Tokens of one answer, which is cut there."""
    max_context_length: int
    """Tokens of the whole conversation."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The record of an episode: everything but its tokens."""

    reward: float | None
    """Sum of the environment's rewards; None if the episode has failed."""
    num_turns: int
    """Number of answers of the model."""
    finish_reason: str
    """"stop", "turns", "context" or "env", see `Episode.finish`."""
    failure: str | None
    cause: str | None
    prompt: list[Message]
    """The environment's first messages."""
    turns: list[Message]
    """All messages after them."""
    turn_rewards: list[float]
    """The environment's reward for each answer; 0 where it gave none."""
    turn_lengths: list[int]
    """Number of sampled tokens of each answer."""

    @property
    def answers(self) -> list[str]:
        """Text of each answer of the model."""
        return [message["content"] for message in self.turns if message["role"] == "assistant"]


@dataclass(eq=False, slots=True)
class Episode:
    """One attempt at one row of the data, with its state so far."""

    row: Mapping[str, Any]
    """Row of the data set, as the environment gets it."""
    session: Session | None = None
    """Tokens of the conversation. None before the first messages, and if there never were any."""
    reward: float | None = 0.0
    """Sum of the rewards that the environment has given so far; None if the episode has failed."""
    turn_rewards: list[float | None] = field(default_factory=list)
    """The environment's reward for each answer that it has replied to; None where it gave none."""
    finish: str = ""
    """Why the episode ended: "stop" (the environment), "turns" or "context" (a limit), "env" (a failure)."""
    truncated: bool = False
    """Whether an answer was cut at a limit, or a limit ended the episode."""
    failure: str | None = None
    cause: str | None = None
    """Cause of the failure, one of `env_messages.CAUSES`."""

    @property
    def has_answers(self) -> bool:
        return self.session is not None and self.session.num_answers > 0

    @property
    def result(self) -> EpisodeResult:
        """The record of the ended episode."""
        session = self.session
        messages = session.messages if session is not None else []
        first = session.num_first if session is not None else 0
        return EpisodeResult(
            self.reward,
            session.num_answers if session is not None else 0,
            self.finish,
            self.failure,
            self.cause,
            messages[:first],
            messages[first:],
            [reward or 0.0 for reward in self.turn_rewards],
            session.answer_lengths if session is not None else [],
        )

    def fail(self, cause: str, failure: str) -> None:
        """End the episode without a reward."""
        self.finish, self.reward, self.cause, self.failure = "env", None, cause, failure

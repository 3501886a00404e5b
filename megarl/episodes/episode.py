"""Define an episode: one attempt of the model at one row, in one or several turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.episodes.chat import Message
from megarl.episodes.session import Branch, Session


FIRST_ACTOR = "actor"
"""Name of the first actor, which answers unless an environment names another one."""
SILENT = "silent"
"""Cause of the missing reward of an actor that was asked for no answer in an episode of several actors."""
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
    """Tokens of one conversation."""
    max_branches: int = 1
    """Conversations of an agent's episode, each a sample for training."""


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
    """The first messages of the episode."""
    turns: list[Message]
    """All messages after them, in the first conversation."""
    answers: list[str]
    """Text of each answer of the model, in the order in which they were given."""
    turn_rewards: list[float]
    """The environment's reward for each answer; 0 where it gave none."""
    turn_lengths: list[int]
    """Number of sampled tokens of each answer."""
    further: list[list[Message]]
    """Messages of each further conversation."""
    num_unreadable: int = 0
    """Number of answers with tool calls that cannot be read."""
    num_constrained: int = 0
    """Number of answers that were sampled by a JSON schema, and are not trained on."""

    @property
    def num_branches(self) -> int:
        """Number of conversations, each a sample for training."""
        return 1 + len(self.further)


@dataclass(eq=False, slots=True)
class Episode:
    """One attempt at one row of the data, with its state so far."""

    row: Mapping[str, Any]
    """Row of the data set, as the environment gets it."""
    session: Session | None = None
    """Tokens of the conversations. None before the first messages, and if there never were any."""
    reward: float | None = 0.0
    """Sum of the rewards that the environment has given so far; None if the episode has failed."""
    turn_rewards: list[float | None] = field(default_factory=list)
    """The environment's reward for each answer that it has replied to; None where it gave none."""
    finish: str = ""
    """Why the episode ended: "stop" (the environment), "turns" or "context" (a limit), "env" (a failure)."""
    has_cut_answer: bool = False
    """Whether an answer was cut at a limit."""
    failure: str | None = None
    cause: str | None = None
    """Cause of the failure, one of `env_messages.CAUSES`."""
    num_unreadable: int = 0
    """Number of answers with tool calls that cannot be read."""
    others: dict[str, Episode] = field(default_factory=dict)
    """Name of each further actor that plays in the episode -> its own record: conversation and rewards."""
    limits: Limits | None = None
    """Limits of this episode; None: those of the play."""

    @property
    def seats(self) -> dict[str, Episode]:
        """Name of each actor that plays in the episode -> its own record. The first actor's is this one."""
        return {FIRST_ACTOR: self, **self.others}

    @property
    def has_answers(self) -> bool:
        """Whether it has an answer that can be trained on."""
        return self.session is not None and any(not turn.is_constrained for turn in self.session.answered)

    @property
    def truncated(self) -> bool:
        """Whether an answer was cut at a limit, or a limit ended the episode."""
        return self.has_cut_answer or self.finish in ("turns", "context")

    @property
    def result(self) -> EpisodeResult:
        """The record of the ended episode."""
        session, branches = self.session, self.branches
        asked = session.turns[0].messages if session is not None and session.turns else []
        prompt, turns = asked, []
        if branches:
            first = branches[0].messages
            prompt, turns = first[: branches[0].num_first], first[branches[0].num_first :]
        return EpisodeResult(
            self.reward,
            session.num_answers if session is not None else 0,
            self.finish,
            self.failure,
            self.cause,
            prompt,
            turns,
            session.answers if session is not None else [],
            [reward or 0.0 for reward in self.turn_rewards],
            session.answer_lengths if session is not None else [],
            [branch.messages for branch in branches[1:]],
            self.num_unreadable,
            sum(turn.is_constrained for turn in session.answered) if session is not None else 0,
        )

    @property
    def branches(self) -> list[Branch]:
        """The samples of the episode; [] without an answer."""
        return self.session.branches() if self.session is not None else []

    def fail(self, cause: str, failure: str) -> None:
        """End the episode without a reward."""
        self.finish, self.reward, self.cause, self.failure = "env", None, cause, failure

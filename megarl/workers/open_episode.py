"""Hold what is known about an open episode of episode_stream.py, and how a checkpoint and a log store it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.episodes.environments import Reply, Request
from megarl.episodes.episode import Episode
from megarl.episodes.runner import Turn
from megarl.rollout.draws import AnswerKeys
from megarl.workers.request_stream import Answer, SavedAnswer, SavedTurn, sample_of
from megarl.workers.store import RolloutSample


@dataclass(eq=False)
class OpenEpisode:
    """An open episode, with the requests that sample its turns."""

    first: Answer
    """Its ids, the key of its draws, and the row's own prompt."""
    how: Mapping[str, float]
    """temperature, top_p and top_k."""
    episode: Episode
    keys: AnswerKeys
    index: int
    """Its place in the order in which the episodes were opened."""
    number: int = -1
    """Its number among the environments."""
    events: list[tuple[Reply | None, SavedTurn | None]] = field(default_factory=list)
    requests: dict[int, str] = field(default_factory=dict)
    """Turn -> id of the request that samples it; {} while its environment works."""
    max_tokens: dict[int, int] = field(default_factory=dict)
    """Turn -> limit of its answer."""
    is_over: bool = False
    """Whether it has ended without an answer, so that the request samples its one token."""

    @property
    def name(self) -> str:
        return f"{self.first.purpose}/{self.first.sample_id}"

    @property
    def prompt(self) -> list[int]:
        """Ids of the conversation so far; of several the one with the last turn."""
        session = self.episode.session
        if self.is_over or session is None or not session.turns:
            return self.first.prompt
        return [*session.turns[-1].prompt, *session.turns[-1].sampled]

    def answer_of(self, turn: Turn) -> Answer:
        """Return the answer to a new turn, without a token yet."""
        self.max_tokens[turn.number] = turn.max_tokens
        return replace(self.first, prompt=turn.prompt, key=self.keys.next(turn.prompt), turn=turn.number)

    def has_answered(self, request: Request | None) -> bool:
        """Return whether the turn that an agent's request continues has its answer, if there is one."""
        if request is None or request.parent is None:
            return True
        session = self.episode.session
        return session is not None and any(turn.number == request.parent for turn in session.answered)

    def saved(self, running: Sequence[Answer]) -> SavedAnswer:
        """Return the episode as a checkpoint stores it.

        Args:
            running: turns that are being sampled, with their tokens so far."""
        turns = sorted(running, key=lambda answer: answer.turn)
        first, *others = turns or [replace(self.first, prompt=self.prompt)]
        further = [SavedAnswer(answer, None) for answer in others]
        return SavedAnswer(first, None, events=self.events, further=further)


def samples_of(saved: SavedAnswer) -> list[RolloutSample]:
    """Return the samples of a finished episode of a checkpoint."""
    parts = [saved, *saved.further]
    return [
        sample_of(
            part.answer,
            part.finish_reason or "",
            part.holes,
            episode=part.episode,
            branch=number,
            num_branches=len(parts),
        )
        for number, part in enumerate(parts)
    ]


def fields_of(reply: Reply) -> dict[str, Any]:
    """Return what a log stores of a reply: all that is not the default."""
    default = Reply(reply.episode)
    values = {name: getattr(reply, name) for name in reply.__slots__ if name != "episode"}
    return {name: value for name, value in values.items() if value != getattr(default, name)}

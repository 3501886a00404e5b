"""Hold what is known about an open episode of episode_stream.py, and how a checkpoint and a log store it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from megarl.episodes.environments import Reply, Request
from megarl.episodes.episode import Episode, EpisodeResult
from megarl.episodes.runner import Turn
from megarl.packing import run_lengths
from megarl.rollout.draws import AnswerKeys
from megarl.workers.answer import LAST_TURN, Answer
from megarl.workers.request_stream import SavedAnswer
from megarl.workers.store import RolloutSample


@dataclass(frozen=True)
class SavedTurn:
    """One answer of an episode, which it has got."""

    ids: list[int]
    log_probs: list[float]
    versions: list[int]
    is_cut: bool
    """Whether the answer ended at its limit of tokens."""
    turn: int = LAST_TURN
    """Number of the turn in its episode."""


@dataclass(frozen=True)
class SavedEpisode(SavedAnswer):
    """One episode as a checkpoint stores it. Its `answer` is the turn that is being sampled, or the sample of an
    episode that has ended. If no turn is sampled, the prompt of `answer` is the conversation so far."""

    events: list[tuple[Reply | None, SavedTurn | None]] = field(default_factory=list)
    """Replies of the environment and answers of the model in an open episode, in order."""
    holes: tuple[tuple[int, int], ...] = ()
    """Context in the response of an episode that has ended, see `RolloutSample`."""
    episode: EpisodeResult | None = None
    further: list[SavedEpisode] = field(default_factory=list)
    """The other turns that are being sampled, or the other samples of an episode that has ended."""

    @property
    def answer_versions(self) -> list[list[int]]:
        """Versions of the tokens of each answer."""
        answer, told = self.answer, [turn.versions for _, turn in self.events if turn is not None]
        lengths = run_lengths(len(answer.prompt), len(answer.response), self.holes)[1::2]
        own = [answer.versions[start:end] for start, end in pairwise([0, *accumulate(lengths)])]
        return [*told, *own, *(versions for one in self.further for versions in one.answer_versions)]

    @property
    def is_mixed(self) -> bool:
        return any(len({*versions}) > 1 for versions in self.answer_versions)

    @property
    def progress(self) -> tuple[int, ...]:
        num_tokens = sum(len(one.answer.response) for one in (self, *self.further))
        return self.finish_reason is not None, len(self.events), num_tokens


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
    turns: dict[int, Turn] = field(default_factory=dict)
    """Number of each turn -> how it is to be answered."""
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
        self.turns[turn.number] = turn
        return replace(self.first, prompt=turn.prompt, key=self.keys.next(turn.prompt), turn=turn.number)

    def has_answered(self, request: Request | None) -> bool:
        """Return whether the turn that an agent's request continues has its answer, if there is one."""
        if request is None or request.parent is None:
            return True
        session = self.episode.session
        return session is not None and any(turn.number == request.parent for turn in session.answered)

    def saved(self, running: Sequence[Answer]) -> SavedEpisode:
        """Return the episode as a checkpoint stores it.

        Args:
            running: turns that are being sampled, with their tokens so far."""
        turns = sorted(running, key=lambda answer: answer.turn)
        first, *others = turns or [replace(self.first, prompt=self.prompt)]
        further = [SavedEpisode(answer, None) for answer in others]
        return SavedEpisode(first, None, events=self.events, further=further)


def saved_episodes(samples: Iterable[RolloutSample]) -> list[SavedEpisode]:
    """Return the episodes of these samples as a checkpoint stores them."""
    found: dict[int, SavedEpisode] = {}
    for sample in samples:  # the first sample of an episode comes before its others
        saved = SavedEpisode.of(sample, holes=sample.holes, episode=sample.episode)
        if sample.branch == 0:
            found[sample.sample_id] = saved
        else:
            found[sample.first_id].further.append(saved)
    return [*found.values()]


def samples_of(saved: SavedEpisode) -> list[RolloutSample]:
    """Return the samples of an episode of a checkpoint that has ended."""
    parts = [saved, *saved.further]
    return [
        part.answer.sample(
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

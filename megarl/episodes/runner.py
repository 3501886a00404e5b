"""Play episodes between one engine and the environments, or agents (environments.py).

A turn enters the engine's running batch as soon as its environment has replied to the turn before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.episodes.chat import Chat
from megarl.episodes.environments import Environments, Reply, Sampled
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.session import Session
from megarl.runtime.abort import ABORT

_LOOK_S = 0.2  # interval between two looks for an abort
_MOST_LOOKS = 16  # between two steps: an agent that is refused may ask again and again


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer that the engine is asked for."""

    index: int
    """Index of the episode among those that are played."""
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that the engine has sampled."""

    index: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    is_cut: bool
    """Whether the answer ended at its `max_tokens`."""


class TurnEngine(Protocol):
    """An engine that answers turns in any order, step by step."""

    def add(self, turns: Sequence[Turn]) -> None: ...
    def has_unfinished(self) -> bool: ...
    def step(self) -> None: ...
    def take(self) -> list[Answer]: ...


def play(
    episodes: Sequence[Episode], engine: TurnEngine, environments: Environments, chat: Chat, limits: Limits
) -> None:
    """Play all episodes until each has ended.

    Raises: Aborted if the job shuts down; ValueError if the environment cannot be loaded."""
    _Play(episodes, engine, environments, chat, limits).run()


class _Play:
    """The episodes of one call of `play`."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        engine: TurnEngine,
        environments: Environments,
        chat: Chat,
        limits: Limits,
    ) -> None:
        self._episodes, self._engine, self._environments = episodes, engine, environments
        self._chat, self._limits = chat, limits
        self._index_of: dict[int, int] = {}  # number in the pool -> index, of the open episodes
        self._number_of: dict[int, int] = {}

    def run(self) -> None:
        try:
            for index, episode in enumerate(self._episodes):
                number = self._environments.open(episode.row)
                self._index_of[number], self._number_of[index] = index, number
            while self._index_of or self._engine.has_unfinished():  # an agent may end before its answer
                self._take_replies()
                if self._engine.has_unfinished():
                    self._engine.step()
                    self._take_answers()
        finally:
            for number in self._index_of:
                self._environments.end(number)

    def _take_replies(self) -> None:
        """Queue the turns whose environments have replied. Waits if the engine has nothing to do.

        Replies that arrive while others become turns are taken too, so that no seat is free for a step while
        an episode is ready."""
        patience = 0.0 if self._engine.has_unfinished() else _LOOK_S
        for _ in range(_MOST_LOOKS):
            replies = self._environments.replies(patience)
            ABORT.check()
            self._engine.add(
                [turn for reply in replies if reply.episode in self._index_of for turn in self._after(reply)]
            )
            if not replies:
                break
            patience = 0.0

    def _after(self, reply: Reply) -> Iterable[Turn]:
        """Return the turn that follows a reply; none if the episode has ended or the reply is refused."""
        index = self._index_of[reply.episode]
        episode = self._episodes[index]
        if reply.failure is not None:
            episode.fail(reply.cause or "raised", reply.failure)
        elif not self._continue(episode, reply):
            return ()
        if episode.finish:
            self._end(index)
            return ()
        session = episode.session
        assert session is not None
        room = min(self._limits.max_context_length - len(session), self._limits.max_response_length)
        return [Turn(index, session.prompt, min(room, reply.max_tokens or room))]

    def _continue(self, episode: Episode, reply: Reply) -> bool:
        """Add a reply to its episode, and note why the episode has ended, if it has.

        Returns: False if the reply is refused and another one follows."""
        assert episode.reward is not None
        episode.reward += reply.reward or 0.0
        if episode.has_answers:
            answered = episode.session.num_answers
            episode.turn_rewards[answered - 1 :] = [reply.reward]  # a refused reply is replaced by the next
        if reply.done:
            episode.finish = episode.finish or "stop"
            return True
        if episode.has_answers and episode.session.num_answers >= self._limits.max_turns:
            episode.finish, episode.truncated = "turns", True
            why = f"the episode has had --max-turns ({self._limits.max_turns}) answers"
            return not self._environments.refuse(reply.episode, "context_length_exceeded", why)
        return self._append(episode, reply)

    def _append(self, episode: Episode, reply: Reply) -> bool:
        """Append a reply's messages. Returns: False if they are refused and another reply follows."""
        try:
            if episode.session is None:
                episode.session = Session(self._chat, reply.messages, reply.tools)
            else:
                episode.session.append(reply.messages)
        except ValueError as error:
            if self._environments.refuse(reply.episode, "invalid_value", str(error)):
                return False
            episode.fail("refused", str(error))
            return True
        limit, length = self._limits.max_context_length, len(episode.session)
        if length < limit:
            return True
        if episode.has_answers:
            episode.finish, episode.truncated = "context", True
            why = f"the messages have {length} tokens, and --max-context-length is {limit}"
            return not self._environments.refuse(reply.episode, "context_length_exceeded", why)
        episode.fail(
            "refused",
            f"the first messages have {length} tokens, and --max-context-length ({limit}) leaves no token for "
            "an answer",
        )
        return True

    def _take_answers(self) -> None:
        for answer in self._engine.take():
            episode = self._episodes[answer.index]
            if episode.finish:  # its agent has ended meanwhile
                continue
            assert episode.session is not None
            sampled = Sampled(episode.session.prompt, answer.token_ids, answer.is_cut)
            text = episode.session.answer(answer.token_ids, answer.log_probs, answer.versions)
            episode.truncated = episode.truncated or answer.is_cut
            self._environments.step(self._number_of[answer.index], text, sampled)

    def _end(self, index: int) -> None:
        number = self._number_of[index]
        del self._index_of[number]
        self._environments.end(number)

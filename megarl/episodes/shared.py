"""Play episodes in which several actors take turns, each with an engine and a conversation of its own.

The environment says whose turn it is (`Reply.actor`). Its messages are added to the conversation of that actor
alone, so each actor sees and learns from its own observations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.episodes.chat import Chat
from megarl.episodes.environments import Environments, Reply
from megarl.episodes.episode import FIRST_ACTOR, SILENT, Episode, Limits
from megarl.episodes.runner import Answer, Play, Turn, TurnEngine, failure_of, reward_of
from megarl.episodes.session import Session, TurnRecord


@dataclass(frozen=True, slots=True)
class Seat:
    """What an actor has of its own in the episodes: the form of its conversations, and their limits."""

    chat: Chat
    limits: Limits


class SharedPlay(Play):
    """The open episodes of several actors: whose turn follows a reply, and which call follows an answer.

    An episode ends for all of its actors at once, also by a limit or a failure of one.

    Args:
        seats: actor -> its seat, the first actor's first."""

    def __init__(self, environments: Environments, seats: Mapping[str, Seat]) -> None:
        first = seats[FIRST_ACTOR]
        super().__init__(environments, first.chat, first.limits)
        self._seats = seats

    def _after(self, reply: Reply) -> Iterable[Turn]:
        """Return the turn that follows a reply; none if the episode has ended."""
        index = self._index_of[reply.episode]
        episode, actor = self._episodes[index], reply.actor or FIRST_ACTOR
        failure = failure_of(reply, episode.seats)
        turn: TurnRecord | None = None
        if failure is None:
            for name, record in episode.seats.items():
                _earn(record, reward_of(reply, name))
            if reply.done:
                episode.finish = "stop"
            else:
                turn = self._turn(episode, actor, reply)
        else:
            episode.fail(*failure)
        if turn is None:
            _end(episode)
            self.end(index)
            return ()
        limits = self._seats[actor].limits
        room = min(limits.max_context_length - len(turn.prompt), limits.max_response_length)
        return [Turn(index, turn.prompt, room, turn.number, actor)]

    def _turn(self, episode: Episode, actor: str, reply: Reply) -> TurnRecord | None:
        """Open the turn that a reply asks an actor for; None if this ends the episode."""
        record, seat = episode.seats[actor], self._seats[actor]
        if record.session is None:
            record.session = Session(seat.chat, episode.row)
        session = record.session
        if len(session.turns) >= seat.limits.max_turns:
            episode.finish = "turns"
            return None
        parent = session.answered[-1] if session.answered else None
        try:
            (turn,) = session.open(reply.messages, parent, reply.tools or None)
        except ValueError as error:
            episode.fail("refused", f"messages of {actor}: {error}")
            return None
        limit, length = seat.limits.max_context_length, len(turn.prompt)
        if length >= limit and parent is None:
            episode.fail(
                "refused",
                f"the first messages of {actor} have {length} tokens, and --max-context-length ({limit}) leaves no "
                "token for an answer",
            )
            return None
        session.add([turn])
        if length >= limit:
            episode.finish = "context"
            return None
        return turn


def _earn(record: Episode, reward: float | None) -> None:
    """Add a reward to an actor's record, and to that of its last answer. A reward before its first answer counts
    for the episode only."""
    assert record.reward is not None
    record.reward += reward or 0.0
    if record.session is None or not record.session.num_answers:
        return
    if len(record.turn_rewards) < record.session.num_answers:
        record.turn_rewards.append(reward)
    elif reward is not None:
        record.turn_rewards[-1] = (record.turn_rewards[-1] or 0.0) + reward


def _end(episode: Episode) -> None:
    """Note in the record of every actor how the episode has ended. An actor without an answer has no reward."""
    for name, record in episode.seats.items():
        record.finish = episode.finish
        if episode.failure is not None:
            record.fail(episode.cause or "raised", episode.failure)
        elif not record.has_answers:
            record.reward, record.cause = None, SILENT
            record.failure = f"the episode has ended without an answer of {name}"


class ActorEngines:
    """The engines of several actors, as the one engine that `play_to_end` steps.

    Args:
        of_actor: actor -> its engine."""

    def __init__(self, of_actor: Mapping[str, TurnEngine]) -> None:
        self._of_actor = of_actor

    def add(self, turns: Sequence[Turn]) -> None:
        for actor, engine in self._of_actor.items():
            engine.add([turn for turn in turns if turn.actor == actor])

    def has_unfinished(self) -> bool:
        return any(engine.has_unfinished() for engine in self._of_actor.values())

    def step(self) -> None:
        for engine in self._of_actor.values():
            if engine.has_unfinished():
                engine.step()

    def take(self) -> list[Answer]:
        return [
            replace(answer, actor=actor)
            for actor, engine in self._of_actor.items()
            for answer in engine.take()
        ]

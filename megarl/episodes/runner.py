"""Play episodes between one engine and the environments, or agents (environments.py).

A turn enters the engine's running batch as soon as its environment has replied to the turn before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.episodes.chat import Chat
from megarl.episodes.environments import Environments, Reply, Sampled
from megarl.episodes.episode import FIRST_ACTOR, Episode, Limits
from megarl.episodes.session import Session, TurnRecord
from megarl.runtime.abort import ABORT

_LOOK_S = 0.2  # interval between two looks for an abort
MOST_LOOKS = 16  # between two steps: an agent that is refused may ask again and again


@dataclass(frozen=True, slots=True)
class Turn:
    """A request to the engine for one answer."""

    index: int
    """Index of the episode among those that are played."""
    prompt: list[int]
    max_tokens: int
    number: int = 0
    """Number of this turn among the turns of its episode, from 0."""
    actor: str = FIRST_ACTOR
    """Name of the actor that answers."""
    how: Mapping[str, Any] = field(default_factory=dict)
    """How the answer is sampled, see `Reply`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that the engine has sampled."""

    index: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    is_cut: bool
    """Whether the answer ended at its `max_tokens`."""
    number: int = 0
    """Number of this turn among the turns of its episode, from 0."""
    actor: str = FIRST_ACTOR
    """Name of the actor that has answered."""


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
    play_to_end(Play(environments, chat, limits), episodes, engine, environments)


def play_to_end(
    playing: Play, episodes: Sequence[Episode], engine: TurnEngine, environments: Environments
) -> None:
    """Play all episodes by the rules of `playing` until each has ended. Raises as `play`."""
    try:
        for index, episode in enumerate(episodes):
            playing.open(index, episode)
        while playing.num_open or engine.has_unfinished():  # an agent may end before its answer
            _take_replies(playing, engine, environments)
            if engine.has_unfinished():
                engine.step()
                for answer in engine.take():
                    playing.answered(answer)
    finally:
        playing.close()


def _take_replies(playing: Play, engine: TurnEngine, environments: Environments) -> None:
    """Queue the turns whose environments have replied. Waits shortly if the engine has nothing to do, so that an
    abort is seen.

    Replies that arrive while others become turns are taken too, so that no seat is free for a step while an
    episode is ready."""
    patience = 0.0 if engine.has_unfinished() else _LOOK_S
    for _ in range(MOST_LOOKS):
        replies = environments.replies(patience)
        ABORT.check()
        engine.add(playing.turns_after(replies))
        if not replies:
            break
        patience = 0.0


class Play:
    """The open episodes of one engine: which turn follows a reply, and which call follows an answer."""

    def __init__(self, environments: Environments, chat: Chat, limits: Limits) -> None:
        self._environments, self._chat, self._limits = environments, chat, limits
        self._episodes: dict[int, Episode] = {}  # open episodes, by index
        self._index_of: dict[int, int] = {}  # number in the pool -> index, of the open episodes
        self._number_of: dict[int, int] = {}

    @property
    def num_open(self) -> int:
        return len(self._episodes)

    def open(self, index: int, episode: Episode) -> int:
        """Start an episode, and return its number in the pool. Its first messages are a reply."""
        number = self._environments.open(episode.row)
        self._episodes[index], self._index_of[number], self._number_of[index] = episode, index, number
        return number

    def restart(self, index: int, episode: Episode) -> None:
        """Put an episode that has not begun in the place of an open one."""
        self._episodes[index] = episode

    def close(self) -> None:
        """End all episodes, the latest first: those wait for the place of an earlier one and would get it."""
        for index in reversed([*self._episodes]):
            self.end(index)

    def turns_after(self, replies: Iterable[Reply]) -> list[Turn]:
        """Return the turns that follow replies of open episodes."""
        return [turn for reply in replies if reply.episode in self._index_of for turn in self._after(reply)]

    def answered(self, answer: Answer) -> None:
        """Give an answer of the model to the environment of its episode, if the episode is still open."""
        episode = self._episodes.get(answer.index)
        if episode is None:  # its agent has ended meanwhile
            return
        episode = episode.seats[answer.actor]
        assert episode.session is not None
        turn, log_probs = episode.session.turns[answer.number], answer.log_probs
        sampled = Sampled(turn.prompt, answer.token_ids, answer.is_cut, log_probs, turn.number, turn.request)
        text = episode.session.answer(turn, answer.token_ids, log_probs, answer.versions)
        episode.has_cut_answer = episode.has_cut_answer or answer.is_cut
        self._environments.step(self._number_of[answer.index], text, sampled)

    def _after(self, reply: Reply) -> Iterable[Turn]:
        """Return the turns that follow a reply; none if the episode has ended or the reply is refused."""
        index = self._index_of[reply.episode]
        episode = self._episodes[index]
        episode.num_unreadable += reply.num_unreadable
        if (failure := failure_of(reply, episode.seats)) is not None:
            episode.fail(*failure)
            turns: list[TurnRecord] | None = []
        else:
            turns = self._continue(episode, reply)
        if turns is None:
            return ()
        if episode.finish:
            self.end(index)
            return ()
        limits = episode.limits or self._limits
        rooms = [min(limits.max_context_length - len(t.prompt), limits.max_response_length) for t in turns]
        return [
            Turn(
                index,
                turn.prompt,
                min(room, reply.max_tokens or room),
                turn.number,
                how=reply.how,
            )
            for turn, room in zip(turns, rooms, strict=True)
        ]

    def _continue(self, episode: Episode, reply: Reply) -> list[TurnRecord] | None:
        """Add a reply to its episode, and note why the episode has ended, if it has.

        Returns: the turns to be answered; None if the reply is refused and another one follows."""
        assert episode.reward is not None
        reward = reward_of(reply, FIRST_ACTOR)
        episode.reward += reward or 0.0
        if episode.has_answers:
            answered = episode.session.num_answers
            episode.turn_rewards[answered - 1 :] = [reward]  # a refused reply is replaced by the next
        if reply.done:
            episode.finish = episode.finish or "stop"
            return []
        asked = 0 if episode.session is None else len(episode.session.turns)
        count, limit = 1 if reply.request is None else reply.request.count, self._limits.max_turns
        if asked + count > limit:
            why = f"the episode has had {asked} answers, and --max-turns is {limit}"
            return self._limited(episode, reply, "turns", why, is_final=asked >= limit)
        return self._append(episode, reply)

    def _limited(
        self, episode: Episode, reply: Reply, limit: str, why: str, is_final: bool
    ) -> list[TurnRecord] | None:
        """End an episode at a limit, or refuse the request of an agent, which may go on. Returns as `_continue`
        does."""
        episode.finish = limit
        return None if self._environments.refuse(reply, "context_length_exceeded", why, is_final) else []

    def _append(self, episode: Episode, reply: Reply) -> list[TurnRecord] | None:
        """Open the turns that a reply asks for. Returns as `_continue` does."""
        if episode.session is None:
            episode.session = Session(self._chat, episode.row)
        session = episode.session
        try:
            turns = _open(session, reply)
        except ValueError as error:
            if self._environments.refuse(reply, "invalid_value", str(error)):
                return None
            episode.fail("refused", str(error))
            return []
        limits = episode.limits or self._limits
        limit, length, is_first = limits.max_context_length, len(turns[0].prompt), not session.turns
        if reply.request is None:
            session.add(turns)
        if length >= limit and is_first:
            episode.fail(
                "refused",
                f"the first messages have {length} tokens, and --max-context-length ({limit}) leaves no token for "
                "an answer",
            )
            return []
        if length >= limit:
            why = f"the messages have {length} tokens, and --max-context-length is {limit}"
            return self._limited(episode, reply, "context", why, is_final=False)
        if reply.request is not None:
            num_branches = session.num_branches_with(turns)
            if num_branches > (most := self._limits.max_branches):
                why = (
                    f"the episode would have {num_branches} conversations with these answers, and --max-branches is "
                    f"{most}. Continue one of the others: repeat its messages and add some."
                )
                self._environments.refuse(reply, "too_many_branches", why)
                return None
            session.add(turns)
            episode.finish = ""  # an agent that was refused has found another way
        return turns

    def is_open(self, index: int) -> bool:
        return index in self._episodes

    def end(self, index: int) -> None:
        """End an episode in its environment, and remove it from the open ones."""
        number = self._number_of.pop(index)
        del self._index_of[number], self._episodes[index]
        self._environments.end(number)


def failure_of(reply: Reply, actors: Collection[str]) -> tuple[str, str] | None:
    """Return cause and message of the failure that a reply is; None if it is a good one.

    Args:
        actors: names of the actors that play in the episode."""
    if reply.failure is not None:
        return reply.cause or "raised", reply.failure
    named = [*(reply.rewards or ()), *([] if reply.actor is None or reply.done else [reply.actor])]
    if unknown := [name for name in named if name not in actors]:
        return "malformed", (
            f"the environment names {unknown[0]!r}, and the actors of its episodes are {', '.join(actors)}. Several "
            "actors play in one episode with --num-actors and --share-episodes"
        )
    return None


def reward_of(reply: Reply, actor: str) -> float | None:
    """Return the reward that a reply gives an actor. A plain number is every actor's."""
    return reply.reward if reply.rewards is None else reply.rewards.get(actor)


def _open(session: Session, reply: Reply) -> list[TurnRecord]:
    """Return the turns that a reply asks for. Raises: ValueError if the chat template refuses its messages."""
    request = reply.request
    if request is None:
        parent = session.answered[-1] if session.answered else None
        return session.open(reply.messages, parent, reply.tools or None)
    if request.token_ids is not None:
        turns = session.open_ids(request.token_ids, request.count)
    else:
        parent = None if request.parent is None else session.turns[request.parent]
        turns = session.open(reply.messages, parent, reply.tools, request.count)
    for turn in turns:
        turn.request, turn.is_constrained = request.number, "schema" in reply.how
    return turns

"""Keep the open episodes of one engine between calls, as request_stream.py does for single answers.

A turn is a request of the stream. When it has ended, the environment gets the answer; when the environment
has replied, the next turn is queued, whichever weights the engine has by then. Every reply that takes effect
is logged with the engine step before which it does, so that --replay can repeat it without the environment.

A checkpoint holds the replies and the answers of each open episode. `load` makes the conversation of them,
and lets a new environment repeat its calls; where it replies otherwise, the episode begins anew."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from megarl.episodes.environments import Reply
from megarl.episodes.episode import Episode
from megarl.episodes.repeatable import RepeatableEnvironments
from megarl.episodes.runner import Answer as TurnAnswer
from megarl.episodes.runner import Play, Turn
from megarl.rollout.draws import AnswerKeys
from megarl.rollout.replay_log import Turns
from megarl.rollout.requests import Request
from megarl.invariants import digest
from megarl.runtime.abort import ABORT, Aborted
from megarl.workers.engine_recorder import EngineRecorder
from megarl.workers.episodes import EpisodeSampler, episode_samples
from megarl.workers.request_stream import GREEDY, Answer, RequestStream, SavedAnswer, SavedTurn
from megarl.workers.store import RolloutBlock, RolloutSample, SampleTable

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.005  # wait for an environment while the engine has nothing to do; a command waits as long


@dataclass(eq=False)
class _Open:
    """An open episode."""

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
    request: str | None = None
    """Id of the request that samples its turn; None while its environment works."""
    max_tokens: int = 0
    """Limit of the last turn."""
    is_over: bool = False
    """Whether it has ended without an answer, so that the request samples its one token."""

    @property
    def name(self) -> str:
        return f"{self.first.purpose}/{self.first.sample_id}"

    @property
    def prompt(self) -> list[int]:
        """Ids of the conversation so far."""
        session = self.episode.session
        if self.is_over or session is None or not session.turns:
            return self.first.prompt
        return [*session.turns[-1].prompt, *session.turns[-1].sampled]


class EpisodeStream(RequestStream):
    """The open episodes of one engine.

    Args:
        table, report: those of RequestStream.
        sampler: has the environments, and plays by its limits.
        rows: returns the row of an answer's data set, as its environment gets it."""

    recorder: EngineRecorder
    """Log of the engine, which `step` needs."""

    def __init__(
        self,
        engine: Engine,
        table: SampleTable[RolloutBlock],
        report: Callable[[list[RolloutSample]], None],
        sampler: EpisodeSampler,
        rows: Callable[[Answer], Mapping[str, Any]],
    ) -> None:
        super().__init__(engine, table, self._not_single, report)
        self._environments = RepeatableEnvironments(sampler.environments, sampler.of_agents)
        self._play = Play(self._environments, sampler.chat, sampler.limits)
        self._limits, self._of_agents, self._rows = sampler.limits, sampler.of_agents, rows
        self._open: dict[str, _Open] = {}  # by name
        self._by_number: dict[int, _Open] = {}
        self._held_out: dict[str, RolloutSample] = {}  # finished ones, by name
        self._num_opened = self._num_requests = 0
        self._served_until = time.monotonic()

    @staticmethod
    def _not_single(answer: Answer, finish_reason: str, experts: torch.Tensor | None) -> RolloutSample:
        raise AssertionError("the sample of an episode is made when the episode has ended")

    # Requests are turns.

    def add(self, answers: Sequence[Answer], **how: float) -> None:
        """Open whole groups of episodes."""
        self._look_at_plan()
        self._missing.update(answer.group for answer in answers)
        for answer in answers:
            self._begin(answer, how)

    def sample(
        self, answers: Sequence[Answer], adding: AbstractContextManager[None], **how: float
    ) -> list[RolloutSample]:
        """Play held-out episodes until all have ended, and return their samples in order. The other episodes
        go on meanwhile.

        Args:
            adding: context in which they are opened."""
        self._look_at_plan()
        with adding:
            names = [self._begin(answer, how).name for answer in answers]
        try:
            while not self._held_out.keys() >= {*names}:
                self.step()
        except Aborted:  # episodes of `add` remain, and are saved with the last checkpoint
            for name in self._open.keys() & {*names}:
                self._forget_request(self._open[name])
                self._drop(self._open[name])
            self._held_out.clear()
            raise
        return [self._held_out.pop(name) for name in names]

    def has_unfinished(self) -> bool:
        return bool(self._open)

    def step(self) -> None:
        """Queue the turns whose environments have replied, take a step of the engine, and report the groups
        that are finished by it. Waits a moment if there is nothing to do."""
        self._look_at_plan()
        if self._environments.is_live:
            self._take_replies()
        else:
            self._take_planned()
        if self._answers:
            self._engine.step()
        else:
            ABORT.check()
        self.collect()
        self._served_until = time.monotonic()

    def drain(self) -> None:
        """Take steps until every turn is finished that has begun. No further turn begins."""
        while self._answers:
            if not self._environments.is_live:
                self._take_planned()
            self._engine.step()
            self.collect()

    def _clear(self) -> None:
        super()._clear()
        self._play.close()
        for kept in (self._open, self._by_number, self._held_out):
            kept.clear()

    def _request(self, answer: Answer, max_tokens: int) -> Request:
        one = self._open_of(answer)
        self._num_requests += 1  # a new id each time: the end of an aborted request may be under way
        one.request = f"{one.name}/{self._num_requests}"
        prompt = [*answer.prompt, *answer.response]
        return Request(one.request, prompt, answer.key, max_tokens=max_tokens, **one.how)

    def _allowed_tokens(self, answer: Answer) -> int:
        return self._open_of(answer).max_tokens - len(answer.response)

    def _is_at_limit(self, answer: Answer, output: object) -> bool:
        return False  # config/rules_episodes.py refuses --max-tokens-per-step

    def _place(self, answer: Answer) -> int:
        return self._open_of(answer).index

    def _open_of(self, answer: Answer) -> _Open:
        return self._open[f"{answer.purpose}/{answer.sample_id}"]

    def _end(self, answer: Answer, finish_reason: str, experts: torch.Tensor | None) -> None:
        one = self._open_of(answer)
        one.request = None
        turn = SavedTurn(answer.response, answer.log_probs, answer.versions, finish_reason == "length")
        if one.is_over:
            self._end_episode(one, turn)
        else:
            self._answered(one, turn)

    def _answered(self, one: _Open, turn: SavedTurn) -> None:
        one.events.append((None, turn))
        session = one.episode.session
        assert session is not None
        number = session.turns[-1].number  # --staleness allows one conversation
        self._play.answered(
            TurnAnswer(one.index, turn.ids, turn.log_probs, turn.versions, turn.is_cut, number)
        )

    # Episodes.

    def _begin(self, first: Answer, how: Mapping[str, float]) -> _Open:
        how = {**how, **GREEDY} if first.greedy else how
        one = _Open(first, how, Episode(self._rows(first)), AnswerKeys(first.key), self._num_opened)
        self._num_opened += 1
        one.number = self._play.open(one.index, one.episode)
        self._open[one.name] = self._by_number[one.number] = one
        return one

    def _begin_episode_anew(self, one: _Open) -> None:
        self._forget_request(one)
        one.episode, one.keys = Episode(one.episode.row), AnswerKeys(one.first.key)
        one.events, one.is_over = [], False
        self._play.restart(one.index, one.episode)
        self._environments.restart(one.number)

    def _end_episode(self, one: _Open, single: SavedTurn | None = None) -> None:
        """Forget an episode that has ended, and keep its sample.

        Args:
            single: the token of an episode without an answer."""
        self._drop(one)
        (sample,) = episode_samples(one.first, one.episode, single)  # --staleness allows one conversation
        if one.first.purpose == "train":
            self._finish(sample)
        else:
            self._held_out[one.name] = sample

    def _drop(self, one: _Open) -> None:
        del self._open[one.name], self._by_number[one.number]
        if self._play.is_open(one.index):
            self._play.end(one.index)

    def _forget_request(self, one: _Open) -> None:
        if one.request is not None:
            self._engine.inference.abort([one.request])
            del self._answers[one.request]
            one.request = None

    def _apply(self, events: Iterable[tuple[_Open, Reply | None]]) -> None:
        """Let replies take effect; None begins the episode anew."""
        turns: dict[str, Answer] = {}
        for one, reply in events:
            if one.name not in self._open or one.is_over:
                continue  # an earlier reply has ended it
            if reply is None:
                self._begin_episode_anew(one)
                continue
            turn = self._replied(one, reply)
            if turn is not None:
                turns[one.name] = turn
            elif one.name not in self._open:
                turns.pop(one.name, None)
        self._queue([*turns.values()])
        self._report_whole_groups()

    def _replied(self, one: _Open, reply: Reply) -> Answer | None:
        """Let a reply take effect. Returns the turn that follows, if one does."""
        one.events.append((reply, None))
        turns = self._play.turns_after([reply])
        if self._play.is_open(one.index):
            return self._turn(one, turns[0]) if turns else None
        self._forget_request(one)  # an agent may end before its answer
        if one.episode.has_answers:
            self._end_episode(one)
            return None
        one.is_over = True
        return self._turn(one, Turn(one.index, one.first.prompt, max_tokens=1))

    def _turn(self, one: _Open, turn: Turn) -> Answer:
        one.max_tokens = turn.max_tokens
        return replace(one.first, prompt=turn.prompt, key=one.keys.next(turn.prompt))

    # Replies, which are logged and may be those of a log.

    def _look_at_plan(self) -> None:
        """Ask the environments, unless --replay says what they reply. The time in which no step was taken
        does not count against agents."""
        now = time.monotonic()
        self._environments.extend(now - self._served_until)
        self._served_until = now
        if self.recorder.has_plan:
            self._environments.is_live = False
        elif not self._environments.is_live:
            self._environments.go_live()

    def _take_replies(self) -> None:
        replies = self._environments.replies(0.0 if self._answers else _LOOK_S)
        lost = self._environments.take_lost()
        if lost:
            samples = ", ".join(str(self._by_number[number].first.sample_id) for number in lost)
            why = next(iter(lost.values()))
            _LOG.warning("%d open episodes begin anew: %s. Samples: %s", len(lost), why, samples)
        events: list[tuple[_Open, Reply | None]] = [(self._by_number[number], None) for number in lost]
        events += [
            (self._by_number[reply.episode], reply) for reply in replies if reply.episode in self._by_number
        ]
        if not events:
            return
        version = self._engine.version
        assert version is not None
        told = tuple((one.name, None if reply is None else _fields(reply)) for one, reply in events)
        with self.recorder.taking_effect(Turns(step=version, replies=told)):
            self._apply(events)

    def _take_planned(self) -> None:
        """Let the replies take effect that the run which --replay repeats had at this engine step."""
        while (record := self.recorder.due_replies()) is not None:
            self.collect()
            events = [event for name, fields in record.replies for event in self._planned(name, fields)]
            if len(events) < len(record.replies):
                self.recorder.wait_for_answers(record)
                return
            for _, reply in events:
                if reply is not None:
                    self._environments.note(reply)
            with self.recorder.taking_effect(msgspec.structs.replace(record, engine_step=-1)):
                self._apply(events)

    def _planned(self, name: str, fields: dict[str, Any] | None) -> list[tuple[_Open, Reply | None]]:
        """Return the event that a record of the log means; [] if its episode still waits for the engine."""
        one = self._open.get(name)
        if one is None or fields is None:
            return [] if one is None else [(one, None)]
        reply = msgspec.convert(fields | {"episode": one.number}, Reply)
        is_early = self._of_agents and (reply.done or reply.failure is not None)  # may end before its answer
        return [(one, reply)] if is_early or one.request is None else []

    # Checkpoints.

    def _saved(self, unfinished: Sequence[Answer]) -> list[SavedAnswer]:
        running = {answer.sample_id: answer for answer in unfinished if answer.purpose == "train"}
        return [
            SavedAnswer(
                running.get(one.first.sample_id) or replace(one.first, prompt=one.prompt),
                None,
                events=one.events,
            )
            for one in self._open.values()
            if one.first.purpose == "train"
        ]

    def load(self, answers: Sequence[Answer], files: Iterable[Path], **how: float) -> None:
        """Open whole groups of episodes as `add`, and go on where the files of `save` have left them.

        An episode begins anew if it is longer than --max-context-length allows now, or if the chat template
        makes another prompt of its messages."""
        found = self._read(answers, files)
        self._missing.update(answer.group for answer in answers)
        self._look_at_plan()
        self._environments.is_live = False
        turns: list[Answer] = []
        for answer in answers:
            saved = found.get(answer.sample_id)
            is_usable = saved is not None and self._fits(saved.answer)
            if is_usable and saved.finish_reason is not None:
                self._finish(_sample_of(saved))
                continue
            one = self._begin(answer, how)
            if is_usable:
                turns += self._go_on(one, saved)
        self._queue(turns)
        self._report_whole_groups()
        self._look_at_plan()

    def _fits(self, answer: Answer) -> bool:
        return len(answer.prompt) + len(answer.response) <= self._limits.max_context_length

    def _go_on(self, one: _Open, saved: SavedAnswer) -> list[Answer]:
        """Bring an episode to where it was saved. Returns the turn that it is at, if it is at one."""
        turn = None
        for reply, answer in saved.events:
            turn = None
            if answer is not None:
                self._answered(one, answer)
            elif reply is not None and self._play.is_open(one.index):
                reply = replace(reply, episode=one.number)
                self._environments.note(reply)
                turn = self._replied(one, reply)
        if one.name not in self._open:
            return []  # a limit that is lower now has ended it
        if saved.answer.prompt != one.prompt and not one.is_over:
            _LOG.warning(
                "an open episode begins anew: its prompt differs now. Sample: %d", one.first.sample_id
            )
            self._begin_episode_anew(one)
            return []
        if turn is None:
            return []
        return [self._from(replace(saved.answer.first(one.max_tokens - 1), key=turn.key))]


def _fields(reply: Reply) -> dict[str, Any]:
    """Return what a log stores of a reply: all that is not the default."""
    default = Reply(reply.episode)
    values = {name: getattr(reply, name) for name in reply.__slots__ if name != "episode"}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _sample_of(saved: SavedAnswer) -> RolloutSample:
    """Return the sample of a finished episode of a checkpoint."""
    answer = saved.answer
    return RolloutSample(
        answer.sample_id,
        answer.row,
        group=answer.group,
        versions=answer.versions,
        prompt=answer.prompt,
        response=answer.response,
        log_probs=answer.log_probs,
        truncated=saved.finish_reason == "length",
        digest=digest(answer.prompt, answer.response, saved.holes),
        holes=saved.holes,
        trained=not answer.greedy,
        episode=saved.episode,
    )

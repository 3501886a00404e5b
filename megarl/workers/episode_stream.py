"""Keep the open episodes of one engine between calls, as request_stream.py does for single answers.

A turn is a request of the stream. When it has ended, the environment gets the answer; when the environment
has replied, the next turn is queued, whichever weights the engine has by then. An agent may wait for several
turns of an episode at a time. Every reply that takes effect is logged with the engine step before which it does,
so that --replay can repeat it without the environment. All answers of earlier engine steps are known then, so
what a reply finds follows from its engine step alone.

A checkpoint holds the replies and the answers of each open episode. `load` makes the conversation of them,
and lets a new environment repeat its calls; where it replies otherwise, the episode begins anew."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from megarl.episodes.environments import Reply
from megarl.episodes.episode import Episode
from megarl.episodes.repeatable import RepeatableEnvironments
from megarl.episodes.runner import Answer as TurnAnswer
from megarl.episodes.runner import MOST_LOOKS, Play, Turn
from megarl.rollout.draws import AnswerKeys
from megarl.rollout.replay_log import Turns
from megarl.rollout.requests import Request
from megarl.runtime.abort import ABORT, Aborted
from megarl.workers.answer import GREEDY, LAST_TURN, Answer
from megarl.workers.engine_recorder import EngineRecorder
from megarl.workers.episodes import EpisodeSampler, episode_samples
from megarl.workers.open_episode import (
    OpenEpisode,
    SavedEpisode,
    SavedTurn,
    fields_of,
    samples_of,
    saved_episodes,
)
from megarl.workers.request_stream import RequestStream
from megarl.workers.store import RolloutBlock, RolloutSample, SampleTable

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.005  # wait for an environment while the engine has nothing to do; a command waits as long


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
        super().__init__(engine, table, report)
        self._environments = RepeatableEnvironments(sampler.environments, sampler.of_agents)
        self._play = Play(self._environments, sampler.chat, sampler.limits("train"))
        self._limits, self._of_agents, self._rows = sampler.limits, sampler.of_agents, rows
        self._open: dict[str, OpenEpisode] = {}  # by name
        self._by_number: dict[int, OpenEpisode] = {}
        self._held_out: dict[str, list[RolloutSample]] = {}  # samples of finished ones, by name
        self._num_opened = self._num_requests = 0
        self._served_until = time.monotonic()

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
                self._forget_requests(self._open[name])
                self._drop(self._open[name])
            self._held_out.clear()
            raise
        return [sample for name in names for sample in self._held_out.pop(name)]

    def has_unfinished(self) -> bool:
        return bool(self._open)

    def step(self) -> None:
        """Queue the turns whose environments have replied, take a step of the engine, and report the groups
        that are finished by it. Waits a moment if there is nothing to do."""
        self._look_at_plan()
        if not self._environments.is_live:
            self._take_planned()
        else:  # replies that come while others become turns are taken too, so that no seat is free for a step
            patience = 0.0 if self._answers else _LOOK_S
            for _ in range(MOST_LOOKS):
                if not self._take_replies(patience):
                    break
                patience = 0.0
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
        name = one.requests[answer.turn] = f"{one.name}/{self._num_requests}"
        prompt = [*answer.prompt, *answer.response]
        how = {**one.how, **one.turns[answer.turn].how}
        return Request(name, prompt, answer.key, max_tokens=max_tokens, **how)

    def _from(self, answer: Answer) -> Answer:
        """Begin an answer anew also if the agent's stop string may begin in its saved tokens, or its grammar does."""
        is_special = self._open_of(answer).turns[answer.turn].how
        return answer.first(0) if is_special else super()._from(answer)

    def _allowed_tokens(self, answer: Answer) -> int:
        return self._open_of(answer).turns[answer.turn].max_tokens - len(answer.response)

    def _is_at_limit(self, answer: Answer, output: object) -> bool:
        return False  # config/rules_episodes.py refuses --max-tokens-per-step

    def _place(self, answer: Answer) -> tuple[int, int]:
        return self._open_of(answer).index, answer.turn

    def _open_of(self, answer: Answer) -> OpenEpisode:
        return self._open[f"{answer.purpose}/{answer.sample_id}"]

    def _end(self, answer: Answer, finish_reason: str, experts: torch.Tensor | None) -> None:
        one = self._open_of(answer)
        del one.requests[answer.turn]
        is_cut = finish_reason == "length"
        turn = SavedTurn(answer.response, answer.log_probs, answer.versions, is_cut, answer.turn)
        if one.is_over:
            self._end_episode(one, turn)
        else:
            self._answered(one, turn)

    def _answered(self, one: OpenEpisode, turn: SavedTurn) -> None:
        one.events.append((None, turn))
        session = one.episode.session
        assert session is not None
        number = session.turns[turn.turn].number
        self._play.answered(
            TurnAnswer(one.index, turn.ids, turn.log_probs, turn.versions, turn.is_cut, number)
        )

    # Episodes.

    def _begin(self, first: Answer, how: Mapping[str, float]) -> OpenEpisode:
        how = {**how, **GREEDY} if first.greedy else how
        episode = Episode(self._rows(first), limits=self._limits(first.purpose))
        one = OpenEpisode(first, how, episode, AnswerKeys(first.key), self._num_opened)
        self._num_opened += 1
        one.number = self._play.open(one.index, one.episode)
        self._open[one.name] = self._by_number[one.number] = one
        return one

    def _begin_episode_anew(self, one: OpenEpisode) -> None:
        self._forget_requests(one)
        one.episode, one.keys = Episode(one.episode.row), AnswerKeys(one.first.key)
        one.events, one.is_over = [], False
        self._play.restart(one.index, one.episode)
        self._environments.restart(one.number)

    def _end_episode(self, one: OpenEpisode, single: SavedTurn | None = None) -> None:
        """Forget an episode that has ended, and keep its samples.

        Args:
            single: the token of an episode without an answer."""
        self._drop(one)
        samples = episode_samples(one.first, one.episode, single)
        if one.first.purpose == "train":
            self._finish(samples)
        else:
            self._held_out[one.name] = samples

    def _drop(self, one: OpenEpisode) -> None:
        del self._open[one.name], self._by_number[one.number]
        if self._play.is_open(one.index):
            self._play.end(one.index)

    def _forget_requests(self, one: OpenEpisode) -> None:
        if one.requests:
            names = [*one.requests.values()]
            self._engine.inference.abort(names)
            for name in names:
                del self._answers[name]
            one.requests.clear()

    def _apply(self, events: Iterable[tuple[OpenEpisode, Reply | None]]) -> None:
        """Let replies take effect; None begins the episode anew."""
        turns: dict[str, list[Answer]] = {}
        for one, reply in events:
            if one.name not in self._open or one.is_over:
                continue  # an earlier reply has ended it
            if reply is None:
                self._begin_episode_anew(one)
                continue
            more = self._replied(one, reply)
            if one.name not in self._open or one.is_over:
                turns.pop(one.name, None)
            turns.setdefault(one.name, []).extend(more)
        self._queue([turn for of_one in turns.values() for turn in of_one])
        self._report_whole_groups()

    def _replied(self, one: OpenEpisode, reply: Reply) -> list[Answer]:
        """Let a reply take effect. Returns the turns that follow."""
        one.events.append((reply, None))
        turns = self._play.turns_after([reply])
        if not self._play.is_open(one.index):
            self._forget_requests(one)  # an agent may end before its answers
            if one.episode.has_answers:
                self._end_episode(one)
            else:
                one.is_over = True
                turns = [Turn(one.index, one.first.prompt, max_tokens=1)]
        return [one.answer_of(turn) for turn in turns]

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

    def _take_replies(self, patience: float) -> bool:
        """Let the replies take effect that have arrived. Returns whether there were any.

        Args:
            patience: seconds to wait for the first."""
        replies = self._environments.replies(patience)
        lost = self._environments.take_lost()
        if lost:
            samples = ", ".join(str(self._by_number[number].first.sample_id) for number in lost)
            why = next(iter(lost.values()))
            _LOG.warning("%d open episodes begin anew: %s. Samples: %s", len(lost), why, samples)
        events: list[tuple[OpenEpisode, Reply | None]] = [(self._by_number[number], None) for number in lost]
        events += [
            (self._by_number[reply.episode], reply) for reply in replies if reply.episode in self._by_number
        ]
        if events:
            version = self._engine.version
            assert version is not None
            told = tuple((one.name, None if reply is None else fields_of(reply)) for one, reply in events)
            with self.recorder.taking_effect(Turns(step=version, replies=told)):
                self.collect()
                self._apply(events)
        return bool(events)

    def _take_planned(self) -> None:
        """Let the replies take effect that the run which --replay repeats had at this engine step."""
        while (record := self.recorder.due_replies()) is not None:
            with self.recorder.taking_effect(msgspec.structs.replace(record, engine_step=-1)):
                self.collect()
                events = [self._planned(record, name, fields) for name, fields in record.replies]
                for _, reply in events:
                    if reply is not None:
                        self._environments.note(reply)
                self._apply(events)

    def _planned(
        self, record: Turns, name: str, fields: dict[str, Any] | None
    ) -> tuple[OpenEpisode, Reply | None]:
        """Return the event that an entry of a record means. Raises: ReplayError if the episode cannot be at it."""
        one = self._open.get(name)
        if one is None:
            raise self.recorder.unexpected(record)
        if fields is None:
            return one, None
        reply = msgspec.convert(fields | {"episode": one.number}, Reply)
        # an agent may ask, or end, while it waits for other answers
        if not (one.has_answered(reply.request) if self._of_agents else not one.requests):
            raise self.recorder.unexpected(record)
        return one, reply

    # Checkpoints.

    def _saved(self, unfinished: Iterable[Answer], finished: Iterable[RolloutSample]) -> list[SavedEpisode]:
        running: dict[str, list[Answer]] = {}
        for answer in unfinished:
            running.setdefault(self._open_of(answer).name, []).append(answer)
        mine = [one for one in self._open.values() if one.first.purpose == "train"]
        return [*(one.saved(running.get(one.name, [])) for one in mine), *saved_episodes(finished)]

    def load(self, answers: Sequence[Answer], files: Iterable[Path], **how: float) -> None:
        """Open whole groups of episodes as `add`, and go on where the files of `save` have left them.

        An episode begins anew if it is longer than --max-context-length allows now, or if the chat template
        makes another prompt of its messages."""
        found = self._read(answers, files, SavedEpisode)
        self._missing.update(answer.group for answer in answers)
        self._look_at_plan()
        self._environments.is_live = False
        turns: list[Answer] = []
        for answer in answers:
            saved = found.get(answer.sample_id)
            is_usable = saved is not None and all(self._fits(part.answer) for part in (saved, *saved.further))
            if is_usable and saved.finish_reason is not None:
                self._finish(samples_of(saved))
                continue
            one = self._begin(answer, how)
            if is_usable:
                turns += self._go_on(one, saved)
        self._queue(turns)
        self._report_whole_groups()
        self._look_at_plan()

    def _fits(self, answer: Answer) -> bool:
        return len(answer.prompt) + len(answer.response) <= self._limits(answer.purpose).max_context_length

    def _go_on(self, one: OpenEpisode, saved: SavedEpisode) -> list[Answer]:
        """Bring an episode to where it was saved. Returns the turns that it is at."""
        asked: dict[int, Answer] = {}
        for reply, answer in saved.events:
            if one.name not in self._open or one.is_over:
                break  # a limit that is lower now has ended it
            if answer is not None:
                number = answer.turn if answer.turn != LAST_TURN else max(asked, default=LAST_TURN)
                turn = asked.pop(number, None)
                if turn is None or not self._fits(replace(turn, response=answer.ids)):
                    return self._differs(one)
                self._answered(one, answer)
            elif reply is not None:
                reply = replace(reply, episode=one.number)
                self._environments.note(reply)
                turns = self._replied(one, reply)
                if one.is_over:
                    asked.clear()
                asked |= {turn.turn: turn for turn in turns}
        if one.name not in self._open:
            return []
        running = [saved.answer, *(other.answer for other in saved.further)]
        prompts = [turn.prompt for turn in asked.values()] or [one.prompt]
        if [answer.prompt for answer in running] != prompts:
            return self._differs(one)
        return [
            self._from(replace(answer.first(one.turns[number].max_tokens - 1), key=turn.key, turn=number))
            for answer, (number, turn) in zip(running, asked.items(), strict=False)
        ]

    def _differs(self, one: OpenEpisode) -> list[Answer]:
        sample = one.first.sample_id
        _LOG.warning("an open episode begins anew: its prompt differs now. Sample: %d", sample)
        self._begin_episode_anew(one)
        return []

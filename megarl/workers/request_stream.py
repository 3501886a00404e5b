"""Keep the unfinished requests of one engine between calls, and report each group of samples that is
finished.

    stream.add(answers, temperature=1.0)       whole groups, queued at once
    stream.step()                              one step of the engine; finished groups go to store and driver
    stream.go_on(due=[4])                      after a commit, with --max-tokens-per-step
    stream.save(path, visits)                  everything so far, for a checkpoint
    stream.load(answers, folder, ...)          the same groups in another process, which continue

A response that continues after a checkpoint is a new request, whose prompt ends in the tokens sampled before.
`save` does the same with the unfinished requests of the running job, so that a job that was interrupted
computes what this one does."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.episodes.environments import Reply
from megarl.episodes.episode import EpisodeResult
from megarl.invariants import digest
from megarl.messages import decode, encode
from megarl.packing import run_lengths
from megarl.rollout.interface import Output, Request
from megarl.workers.held_out import is_held_out, with_own_ids
from megarl.workers.store import RolloutBlock, RolloutSample, SampleTable

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine, Response


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
class SavedAnswer:
    """One answer as a checkpoint stores it, finished or not."""

    answer: Answer
    finish_reason: str | None
    """None while it is unfinished."""
    experts: tuple[str, list[int], bytes] | None = None
    """dtype, sizes and content of the experts of its tokens."""
    over_old_cache: bool = False
    """Whether tokens may have been sampled over a KV cache of older weights (--weight-update keep)."""
    events: list[tuple[Reply | None, SavedTurn | None]] = field(default_factory=list)
    """Replies of the environment and answers of the model in an open episode, in order. `answer` is then the
    turn that is being sampled. If none is, its prompt is the conversation so far."""
    holes: tuple[tuple[int, int], ...] = ()
    """Context in the response of a finished episode, see `RolloutSample`."""
    episode: EpisodeResult | None = None
    further: list[SavedAnswer] = field(default_factory=list)
    """Of an episode: the other turns that are being sampled, or its other samples once it has ended."""

    @property
    def answer_versions(self) -> list[list[int]]:
        """Versions of the tokens of each answer. An episode has several."""
        answer, told = self.answer, [turn.versions for _, turn in self.events if turn is not None]
        lengths = run_lengths(len(answer.prompt), len(answer.response), self.holes)[1::2]
        own = [answer.versions[start:end] for start, end in pairwise([0, *accumulate(lengths)])]
        return [*told, *own, *(versions for one in self.further for versions in one.answer_versions)]


class RequestStream:
    """Keeps the unfinished groups of samples of one engine between the driver's calls.

    Args:
        table: gets the samples of finished groups.
        make_sample: returns the sample of a finished answer, its finish reason and the experts of its tokens.
        report: is given the samples of groups that have finished.
    Raises: ValueError for --max-tokens-per-step if the engine cannot continue a response."""

    def __init__(
        self,
        engine: Engine,
        table: SampleTable[RolloutBlock],
        make_sample: Callable[[Answer, str, torch.Tensor | None], RolloutSample],
        report: Callable[[list[RolloutSample]], None],
    ) -> None:
        self._engine, self._table, self._make_sample, self._report = engine, table, make_sample, report
        self._answers: dict[str, Answer] = {}  # unfinished, by request id
        self._how: dict[str, float] = {}
        self._max_tokens = engine.config.sampling.max_response_length
        self._limit = engine.config.streaming.max_tokens_per_step
        if self._limit is not None and engine.inference.cannot_continue is not None:
            raise ValueError(f"--max-tokens-per-step ({self._limit}): {engine.inference.cannot_continue}")
        self._due: frozenset[int] = frozenset()  # groups without that limit
        self._resting: list[Answer] = []  # unfinished, with all tokens that this version may sample
        self._missing: Counter[int] = Counter()  # unfinished answers of each group
        self._finished: dict[int, list[RolloutSample]] = {}  # of unfinished groups
        self.report_held_out: Callable[[list[RolloutSample]], None] = lambda samples: None
        """Is given the samples of held-out rows that have finished."""

    def add(self, answers: Sequence[Answer], **how: float) -> None:
        """Queue whole groups, all of them before the engine's next step.

        Args:
            how: temperature, top_p and top_k of all requests."""
        self._how = how
        self._missing.update(answer.group for answer in answers)
        self._queue(answers)

    def _queue(self, answers: Sequence[Answer]) -> None:
        allowed = [self._allowed_tokens(answer) for answer in answers]
        self._resting += [answer for answer, number in zip(answers, allowed, strict=True) if not number]
        asked = [(answer, number) for answer, number in zip(answers, allowed, strict=True) if number]
        requests = [self._request(answer, number) for answer, number in asked]
        if requests:
            self._engine.add(requests)
        self._answers |= {request.id: one for request, (one, _) in zip(requests, asked, strict=True)}

    def _request(self, answer: Answer, max_tokens: int) -> Request:
        prompt = [*answer.prompt, *answer.response]
        how = self._how | GREEDY if answer.greedy else self._how
        return Request(f"sample/{answer.sample_id}", prompt, answer.key, max_tokens=max_tokens, **how)

    def _allowed_tokens(self, answer: Answer) -> int:
        """Return how many tokens an answer may get from the current version."""
        left = self._max_tokens - len(answer.response)
        if self._limit is None or answer.group in self._due or is_held_out(answer.group):
            return left
        return max(0, min(left, self._limit - answer.versions.count(self._engine.version)))

    def go_on(self, due: Iterable[int] | None = None) -> None:
        """Queue the answers that --max-tokens-per-step has stopped and that may get more tokens: the weights
        have another version, or the group is due.

        Args:
            due: groups that the next training step needs, which have no limit from now on. An answer that
                runs reaches its old limit first. Default: the same groups as before."""
        if due is not None:
            self._due = frozenset(due)
        resting, self._resting = self._resting, []
        self._queue(resting)

    def has_unfinished(self) -> bool:
        """Return whether an answer can get tokens now."""
        return bool(self._answers)

    def step(self) -> None:
        """Take a step of the engine, and report the groups that are finished by it."""
        self._engine.step()
        self.collect()

    def collect(self) -> None:
        """Report the groups that the engine has finished by now, in its own steps and in those of calls."""
        at_limit = []
        for output in self._engine.take():
            answer = self._answers.pop(output.id).after(output)
            if self._is_at_limit(answer, output):
                at_limit.append(answer)
            else:
                self._end(answer, output.finish_reason, output.experts)
        self._queue(at_limit)  # its request may have begun at an earlier version
        self._report_whole_groups()

    def _is_at_limit(self, answer: Answer, output: Output | Response) -> bool:
        """Return whether a request has ended because of --max-tokens-per-step."""
        return output.finish_reason == "length" and len(answer.response) < self._max_tokens

    def _end(self, answer: Answer, finish_reason: str, experts: torch.Tensor | None) -> None:
        self._finish([self._make_sample(answer, finish_reason, experts)])

    def _finish(self, samples: Sequence[RolloutSample]) -> None:
        """Keep the sample of an answer, or all samples of an episode, until the group is whole."""
        self._missing[samples[0].group] -= 1
        self._finished.setdefault(samples[0].group, []).extend(samples)

    def _report_whole_groups(self) -> None:
        whole = [group for group in self._finished if not self._missing[group]]
        done: list[RolloutSample] = []
        for group in whole:
            del self._missing[group]
            samples = sorted(self._finished.pop(group), key=lambda sample: sample.sample_id)
            if is_held_out(group):
                self.report_held_out(with_own_ids(samples))
            else:
                done += samples
        if done:
            self._table.add(RolloutBlock(done))
            self._report(done)

    def drain(self) -> None:
        """Take steps until every request is finished."""
        while self.has_unfinished():
            self.step()

    def abort(self) -> None:
        """Forget all unfinished requests."""
        self._engine.inference.abort([*self._answers])
        self._clear()

    def give_up(self, path: Path) -> None:
        """Forget all requests of a failed engine, after taking what it has reported. The samples of
        unfinished groups are written to a file that `load` reads."""
        known = {output.id: output for output in self._engine.inference.reported()}
        known |= {output.id: output for output in self._engine.take()}
        for name, answer in self._answers.items():
            output = known.get(name)
            answer = answer if output is None else answer.after(output)
            if output is None or output.finish_reason is None or self._is_at_limit(answer, output):
                self._resting.append(answer)
            else:
                self._end(answer, output.finish_reason, output.experts)
        self._answers.clear()
        self._report_whole_groups()
        saved = self._saved(self._resting)
        saved += _saved(sample for group in self._finished.values() for sample in group)
        partial = path.with_name(f".{path.name}.new")
        partial.write_bytes(encode(saved))
        partial.replace(path)  # another rank may be reading
        self._clear()

    def _clear(self) -> None:
        for kept in (self._answers, self._resting, self._missing, self._finished):
            kept.clear()

    # Checkpoints.

    def save(self, path: Path | None, visits: Iterable[int], has_engine: bool = True) -> str:
        """Write the samples of these groups, finished or not, and return the SHA-256 of the file. Unfinished
        requests are computed anew from their prefixes, as after a resume.

        Args:
            path: None on ranks that do not write.
            has_engine: False if the engine is gone, and its requests are given up."""
        wanted = {*visits}
        unfinished = self._saved(self._begin_anew() if has_engine else [])
        finished = [sample for group in self._finished.values() for sample in group]
        finished += [self._table.block(sample).rollouts[sample] for sample in self._table]
        saved = [*unfinished, *_saved(finished)]
        if self._engine.config.streaming.weight_update == "keep":
            is_mixed = [any(len({*versions}) > 1 for versions in one.answer_versions) for one in saved]
            saved = [replace(one, over_old_cache=mixed) for one, mixed in zip(saved, is_mixed, strict=True)]
        data = encode([one for one in saved if one.answer.group in wanted])
        if path is not None:
            with open(path, "wb") as file:
                file.write(data)
                os.fsync(file.fileno())
        return hashlib.sha256(data).hexdigest()

    def _saved(self, unfinished: Sequence[Answer]) -> list[SavedAnswer]:
        """Return unfinished answers as a checkpoint stores them."""
        return [SavedAnswer(answer, None) for answer in unfinished]

    def _begin_anew(self) -> list[Answer]:
        """Let all unfinished requests begin again after their prefixes. Returns the unfinished answers."""
        engine = self._engine.inference
        engine.pause()
        try:
            sampled = {output.id: output for output in engine.progress()}
            self.collect()  # what has finished before the pause
            unfinished = [answer.after(sampled[name]) for name, answer in self._answers.items()]
            engine.abort([*self._answers])
            engine.reset_cache()
            self._answers.clear()
            resting = [*self._resting]
            self._queue(sorted(map(self._from, unfinished), key=self._place))
        finally:
            engine.resume()
        return [*unfinished, *resting]

    def _place(self, answer: Answer) -> tuple[int, int]:
        """Return what requests that begin anew are sorted by: they keep their order."""
        return 0, 0

    def load(self, answers: Sequence[Answer], files: Iterable[Path], **how: float) -> None:
        """Queue whole groups as `add` does, and continue from the files that `save` wrote.

        A response that is longer than --max-response-length allows now is cut there, and counts as truncated.
        With --weight-update recompute the log-prob gate compares every token of the current weights, so a
        response that was sampled over a KV cache of older ones begins anew."""
        found = self._read(answers, files)
        self._how = how
        self._missing.update(answer.group for answer in answers)
        missing = []
        for answer in answers:
            saved = found.get(answer.sample_id)
            if saved is None:
                missing.append(answer)
            elif saved.finish_reason is None:  # its last token comes from the engine, with its experts
                missing.append(self._from(saved.answer.first(self._max_tokens - 1)))
            else:
                self._end(*self._cut(saved))
        self._queue(missing)
        self._report_whole_groups()

    def _read(self, answers: Sequence[Answer], files: Iterable[Path]) -> dict[int, SavedAnswer]:
        """Return sample id -> what the files of `save` have of these answers, as far as it may be used."""
        wanted = {answer.sample_id for answer in answers}
        recomputes = self._engine.config.streaming.weight_update == "recompute"
        found: dict[int, SavedAnswer] = {}
        for one in (one for file in files for one in decode(file.read_bytes(), list[SavedAnswer])):
            if one.answer.sample_id not in wanted or (recomputes and one.over_old_cache):
                continue
            known = found.get(one.answer.sample_id)
            if known is None or _length(known) < _length(one):
                found[one.answer.sample_id] = one
        return found

    def _cut(self, saved: SavedAnswer) -> tuple[Answer, str, torch.Tensor | None]:
        """Return a finished answer, cut to the tokens that it may have, with its finish reason and its
        experts."""
        answer, experts, limit = saved.answer, _experts(saved), self._max_tokens
        if len(answer.response) <= limit:
            return answer, saved.finish_reason, experts
        if experts is not None:
            experts = experts[: len(answer.prompt) + limit]
        return answer.first(limit), "length", experts

    def _from(self, answer: Answer) -> Answer:
        """Return the answer to continue after its saved tokens, or without these tokens if the engine cannot
        continue it.

        A stop string that begins in the prefix would not be found."""
        if self._engine.inference.cannot_continue is None and not self._engine.config.sampling.stop:
            return answer
        return replace(answer, response=[], log_probs=[], versions=[])


def _length(saved: SavedAnswer) -> tuple[bool, int, int]:
    """Return a key that is larger the further an answer has got. Several engines may have saved the answer."""
    num_tokens = sum(len(one.answer.response) for one in (saved, *saved.further))
    return saved.finish_reason is not None, len(saved.events), num_tokens


def sample_of(
    answer: Answer, finish_reason: str, holes: tuple[tuple[int, int], ...] = (), **more: Any
) -> RolloutSample:
    """Return the sample of a finished answer, or of a conversation with these holes.

    Args:
        more: further fields of the sample."""
    return RolloutSample(
        answer.sample_id,
        answer.row,
        group=answer.group,
        versions=answer.versions,
        prompt=answer.prompt,
        response=answer.response,
        log_probs=answer.log_probs,
        truncated=finish_reason == "length",
        digest=digest(answer.prompt, answer.response, holes),
        holes=holes,
        trained=not answer.greedy,
        **more,
    )


def _saved(samples: Iterable[RolloutSample]) -> list[SavedAnswer]:
    """Return finished answers and episodes as a checkpoint stores them."""
    found: dict[int, SavedAnswer] = {}
    for sample in samples:  # the first sample of an episode comes before its others
        saved = _saved_sample(sample)
        if sample.branch == 0:
            found[sample.sample_id] = saved
        else:
            found[sample.first_id].further.append(saved)
    return [*found.values()]


def _saved_sample(sample: RolloutSample) -> SavedAnswer:
    experts = None
    if sample.experts is not None:
        dtype = str(sample.experts.dtype).removeprefix("torch.")
        experts = dtype, list(sample.experts.shape), sample.experts.numpy().tobytes()
    answer = Answer(
        sample.sample_id,
        sample.row,
        sample.group,
        sample.prompt,
        0,  # nothing is drawn any more
        sample.response,
        sample.log_probs,
        sample.versions,
        greedy=not sample.trained,
    )
    reason = "length" if sample.truncated else "stop"
    return SavedAnswer(answer, reason, experts, holes=sample.holes, episode=sample.episode)


def _experts(saved: SavedAnswer) -> torch.Tensor | None:
    if saved.experts is None:
        return None
    dtype, sizes, content = saved.experts
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(sizes)

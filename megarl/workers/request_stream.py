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
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from megarl.files.writing import writing
from megarl.messages import decode, encode
from megarl.rollout.interface import Output, Request
from megarl.workers.answer import GREEDY, Answer
from megarl.workers.held_out import is_held_out, with_own_ids
from megarl.workers.store import RolloutBlock, RolloutSample, SampleTable

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine, Response


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

    @classmethod
    def of(cls, sample: RolloutSample, **more: Any) -> Self:
        """Return a finished answer. Nothing is drawn any more, so it has no key."""
        experts = None
        if sample.experts is not None:
            dtype = str(sample.experts.dtype).removeprefix("torch.")
            experts = dtype, list(sample.experts.shape), sample.experts.numpy().tobytes()
        ids, drawn = (sample.sample_id, sample.row, sample.group), (sample.log_probs, sample.versions)
        answer = Answer(*ids, sample.prompt, 0, sample.response, *drawn, greedy=not sample.trained)
        return cls(answer, "length" if sample.truncated else "stop", experts, **more)

    @property
    def is_mixed(self) -> bool:
        """Whether weights of several versions have sampled the tokens of one answer."""
        return len({*self.answer.versions}) > 1

    @property
    def progress(self) -> tuple[int, ...]:
        """A key that is larger the further the answer has got. Several engines may have saved it."""
        return self.finish_reason is not None, len(self.answer.response)

    def cut(self, limit: int) -> tuple[Answer, str, torch.Tensor | None]:
        """Return a finished answer with at most `limit` tokens, its finish reason, and the experts of its
        tokens."""
        assert self.finish_reason is not None
        reason = "length" if len(self.answer.response) > limit else self.finish_reason
        if self.experts is None:
            return self.answer.first(limit), reason, None
        dtype, sizes, content = self.experts
        experts = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(sizes)
        return self.answer.first(limit), reason, experts[: len(self.answer.prompt) + limit]


Saved = TypeVar("Saved", bound=SavedAnswer)


class RequestStream:
    """Keeps the unfinished groups of samples of one engine between the driver's calls.

    Args:
        table: gets the samples of finished groups.
        report: is given the samples of groups that have finished.
        has_experts: whether a sample gets the experts of its tokens.
    Raises: ValueError for --max-tokens-per-step if the engine cannot continue a response."""

    def __init__(
        self,
        engine: Engine,
        table: SampleTable[RolloutBlock],
        report: Callable[[list[RolloutSample]], None],
        has_experts: bool = False,
    ) -> None:
        self._engine, self._table, self._report, self._has_experts = engine, table, report, has_experts
        self._answers: dict[str, Answer] = {}  # unfinished, by request id
        self._how: dict[str, dict[str, float]] = {}  # by purpose of an answer
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
        self.load(answers, (), **how)

    def _queue(self, answers: Iterable[Answer]) -> None:
        allowed = [(answer, self._allowed_tokens(answer)) for answer in answers]
        self._resting += [answer for answer, number in allowed if not number]
        asked = [(self._request(answer, number), answer) for answer, number in allowed if number]
        if asked:
            self._engine.add([request for request, _ in asked])
        self._answers |= {request.id: answer for request, answer in asked}

    def _request(self, answer: Answer, max_tokens: int) -> Request:
        prompt = [*answer.prompt, *answer.response]
        how = self._how[answer.purpose] | (GREEDY if answer.greedy else {})
        return Request(f"sample/{answer.sample_id}", prompt, answer.key, max_tokens=max_tokens, **how)

    def _allowed_tokens(self, answer: Answer) -> int:
        """Return how many tokens an answer may get from the current version."""
        left = self._max_tokens(answer) - len(answer.response)
        if self._limit is None or answer.group in self._due or is_held_out(answer.group):
            return left
        return max(0, min(left, self._limit - answer.versions.count(self._engine.version)))

    def _max_tokens(self, answer: Answer) -> int:
        return self._engine.config.sampling.of(answer.purpose).max_response_length

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

    def drain(self) -> None:
        """Take steps until every request is finished."""
        while self.has_unfinished():
            self.step()

    def collect(self) -> None:
        """Report the groups that the engine has finished by now, in its own steps and in those of calls."""
        self._queue(self._take(self._engine.take()))  # a request may have begun at an earlier version
        self._report_whole_groups()

    def _take(self, outputs: Iterable[Output | Response]) -> list[Answer]:
        """End the answers that these outputs finish. Returns the others, with the tokens that they have now."""
        unfinished = []
        for output in outputs:
            answer = self._answers.pop(output.id).after(output)
            if output.finish_reason is None or self._is_at_limit(answer, output):
                unfinished.append(answer)
            else:
                self._end(answer, output.finish_reason, output.experts)
        return unfinished

    def _is_at_limit(self, answer: Answer, output: Output | Response) -> bool:
        """Return whether a request has ended because of --max-tokens-per-step."""
        return output.finish_reason == "length" and len(answer.response) < self._max_tokens(answer)

    def _end(self, answer: Answer, finish_reason: str, experts: torch.Tensor | None) -> None:
        self._finish([answer.sample(finish_reason, experts=experts if self._has_experts else None)])

    def _finish(self, samples: Sequence[RolloutSample]) -> None:
        """Keep the sample of an answer, or all samples of an episode, until the group is whole."""
        self._missing[samples[0].group] -= 1
        self._finished.setdefault(samples[0].group, []).extend(samples)

    def _report_whole_groups(self) -> None:
        done: list[RolloutSample] = []
        for group in [group for group in self._finished if not self._missing[group]]:
            del self._missing[group]
            samples = sorted(self._finished.pop(group), key=lambda sample: sample.sample_id)
            if is_held_out(group):
                self.report_held_out(with_own_ids(samples))
            else:
                done += samples
        if done:
            self._table.add(RolloutBlock(done))
            self._report(done)

    def abort(self) -> None:
        """Forget all unfinished requests."""
        if self._answers:
            self._engine.inference.abort([*self._answers])
        self._clear()

    def give_up(self, path: Path) -> None:
        """Forget all requests of a failed engine, after taking what it has reported. The samples of
        unfinished groups are written to a file that `load` reads."""
        outputs = {output.id: output for output in self._engine.inference.reported()}
        outputs |= {output.id: output for output in self._engine.take()}
        self._resting += self._take([outputs[name] for name in self._answers if name in outputs])
        self._report_whole_groups()
        partial = path.with_name(f".{path.name}.new")
        unfinished = [*self._resting, *self._answers.values()]
        with writing(path):
            partial.write_bytes(encode(self._saved(unfinished, chain(*self._finished.values()))))
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
        unfinished = self._begin_anew() if has_engine else []
        reported = [self._table.block(sample).rollouts[sample] for sample in self._table]
        saved = self._saved(unfinished, chain(*self._finished.values(), reported))
        if self._engine.config.streaming.weight_update == "keep":
            saved = [replace(one, over_old_cache=one.is_mixed) for one in saved]
        data = encode([one for one in saved if one.answer.group in wanted])
        if path is not None:
            with writing(path), open(path, "wb") as file:
                file.write(data)
                os.fsync(file.fileno())
        return hashlib.sha256(data).hexdigest()

    def _saved(
        self, unfinished: Iterable[Answer], finished: Iterable[RolloutSample]
    ) -> Sequence[SavedAnswer]:
        """Return answers and samples as a checkpoint stores them."""
        return [*(SavedAnswer(answer, None) for answer in unfinished), *map(SavedAnswer.of, finished)]

    def _begin_anew(self) -> list[Answer]:
        """Let all unfinished requests begin again after their prefixes. Returns the unfinished answers."""
        engine = self._engine.inference
        engine.pause()
        try:
            sampled = {output.id: output for output in engine.progress()}
            self.collect()  # what has finished before the pause
            unfinished = [  # an answer that `collect` has queued again has no new tokens
                answer.after(sampled[name]) if name in sampled else answer
                for name, answer in self._answers.items()
            ]
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
        response that was sampled over a KV cache of older ones begins anew. So does one without experts if
        this job replays those of the engine."""
        found = self._read(answers, files, SavedAnswer)
        self._how |= {answer.purpose: how for answer in answers}
        self._missing.update(answer.group for answer in answers)
        missing = []
        for answer in answers:
            saved = found.get(answer.sample_id)
            if saved is None:
                missing.append(answer)
            elif saved.finish_reason is None:  # its last token comes from the engine, with its experts
                missing.append(self._from(saved.answer.first(self._max_tokens(answer) - 1)))
            else:
                self._end(*saved.cut(self._max_tokens(answer)))
        self._queue(missing)
        self._report_whole_groups()

    def _read(self, answers: Iterable[Answer], files: Iterable[Path], kind: type[Saved]) -> dict[int, Saved]:
        """Return sample id -> what the files of `save` have of these answers, as far as it may be used."""
        wanted = {answer.sample_id for answer in answers}
        usable = [
            one
            for file in files
            for one in decode(file.read_bytes(), list[kind])  # type: ignore[valid-type]
            if one.answer.sample_id in wanted and self._is_usable(one)
        ]
        found: dict[int, Saved] = {}
        for one in sorted(usable, key=lambda one: one.progress, reverse=True):
            found.setdefault(one.answer.sample_id, one)
        return found

    def _is_usable(self, saved: SavedAnswer) -> bool:
        """Return whether this job can take over a saved answer. Otherwise the answer begins anew."""
        recomputes = self._engine.config.streaming.weight_update == "recompute"
        lacks_experts = self._has_experts and saved.finish_reason is not None and saved.experts is None
        return not (recomputes and saved.over_old_cache or lacks_experts)

    def _from(self, answer: Answer) -> Answer:
        """Return the answer to continue after its saved tokens, or without these tokens if the engine cannot
        continue it.

        A stop string that begins in the prefix would not be found. With --weight-update wait one version
        samples all tokens of a response, and the engine may have another one than they come from."""
        engine = self._engine
        waits = engine.config.streaming.weight_update == "wait"
        has_other_version = any(version != engine.version for version in answer.versions)
        if engine.inference.cannot_continue is not None or engine.config.sampling.stop:
            return answer.first(0)
        return answer.first(0) if waits and has_other_version else answer

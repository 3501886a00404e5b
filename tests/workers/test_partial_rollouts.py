"""With --max-tokens-per-step a response gets so many tokens per version of the weights, and then leaves the
engine's batch until the next version, unless its group is due.

    pytest tests/workers/test_partial_rollouts.py

The engine is a small one that computes each token from key and position, as the real engines draw.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.schema import TrainConfig
from megarl.rollout.engine import Engine
from megarl.rollout.interface import InferenceEngine, Output, Request
from megarl.workers.request_stream import Answer, RequestStream
from megarl.workers.store import RolloutBlock, RolloutSample, SampleTable
from tests.trainer.test_actor_state import config

LONGEST, LIMIT, NUM_ROWS = 20, 4, 3
END = 0


def token(key: int, position: int) -> int:
    """Return the token of a response at this position of prompt and response. END ends it."""
    return END if position == 2 + key else 1 + (7 * key + position) % 50


class SmallInference(InferenceEngine):
    """Samples one token of up to NUM_ROWS requests per step, by `token`."""

    device, dtype = "cpu", torch.float32

    def __init__(self) -> None:
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.rows: list[Request] = []
        self.sampled: dict[str, Output] = {}
        self.finished: list[Output] = []
        self.is_paused = False
        self.num_taken = 0

    def add(self, requests: Sequence[Request]) -> None:
        self.waiting += requests
        self.sampled |= {request.id: Output(request.id, [], [], [], None) for request in requests}

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.rows)

    def step(self) -> None:
        if self.is_paused:
            return
        self.num_taken += 1
        while self.waiting and len(self.rows) < NUM_ROWS:
            self.rows.append(self.waiting.popleft())
        for request in [*self.rows]:
            output = self.sampled[request.id]
            new = token(request.key, len(request.prompt) + len(output.token_ids))
            output.token_ids.append(new)
            output.log_probs.append(-0.5 * new)
            output.versions.append(self.version)
            is_full = len(output.token_ids) == request.max_tokens
            if new == END or is_full:
                self.rows.remove(request)
                done = self.sampled.pop(request.id)
                self.finished.append(replace(done, finish_reason="stop" if new == END else "length"))

    def take(self) -> list[Output]:
        finished, self.finished = self.finished, []
        return finished

    def progress(self) -> list[Output]:
        return [*self.sampled.values()]

    def abort(self, ids: Sequence[str]) -> None:
        self.waiting = deque(request for request in self.waiting if request.id not in ids)
        self.rows = [request for request in self.rows if request.id not in ids]
        self.sampled = {name: output for name, output in self.sampled.items() if name not in ids}

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    @property
    def num_steps(self) -> int:
        return self.num_taken

    def hold(self, step: int | None) -> None:
        raise NotImplementedError

    def free_kv_tokens(self) -> int:
        raise NotImplementedError

    def reset_cache(self) -> None:
        pass

    def write_weights(self, copy: Callable[[], object]) -> None:
        raise NotImplementedError

    def pull_weights(self, orders: Sequence, timeout_s: float) -> None:
        raise NotImplementedError

    def wait_for_weights(self, timeout_s: float) -> list:
        raise NotImplementedError

    def commit(self, version: int, running: str = "refuse") -> None:
        self.version = version

    def set_version(self, version: int) -> None:
        self.version = version

    def give_up_weights(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        pass


class Stream:
    """A request stream over the small engine, and what it has reported."""

    def __init__(
        self, job: TrainConfig, limit: int | None = LIMIT, cannot_continue: str | None = None
    ) -> None:
        streaming = replace(job.streaming, staleness=2, max_tokens_per_step=limit)
        sampling = replace(job.sampling, max_response_length=LONGEST)
        self.engine = Engine(replace(job, streaming=streaming, sampling=sampling), None, "")
        self.engine.inference = self.inference = SmallInference()
        self.inference.cannot_continue = cannot_continue
        self.done: list[RolloutSample] = []
        table: SampleTable[RolloutBlock] = SampleTable("train")
        self.stream = RequestStream(self.engine, table, sample_of, self.done.extend)

    def run(self) -> None:
        """Take steps until no response can get a token of this version."""
        while self.stream.has_unfinished():
            self.stream.step()

    def commit(self, version: int, due: Sequence[int] | None = None) -> None:
        self.engine.commit(version)
        self.stream.go_on(due)

    @property
    def groups_done(self) -> set[int]:
        return {sample.group for sample in self.done}


def sample_of(answer: Answer, finish_reason: str, experts: torch.Tensor | None) -> RolloutSample:
    return RolloutSample(
        answer.sample_id,
        answer.row,
        answer.group,
        answer.versions,
        answer.prompt,
        answer.response,
        answer.log_probs,
        truncated=finish_reason == "length",
    )


def answers(*lengths: int, group: int = 0) -> list[Answer]:
    """Return a group of answers of these lengths, longer ones being truncated."""
    return [Answer(10 * group + index, 0, group, [5, 6, 7], length) for index, length in enumerate(lengths)]


def check_whole(stream: Stream, *groups: list[Answer]) -> None:
    """Check that each answer was reported once, with the tokens that an engine without limit samples."""
    assert Counter(sample.sample_id for sample in stream.done) == Counter(
        answer.sample_id for group in groups for answer in group
    )
    key_of = {answer.sample_id: answer.key for group in groups for answer in group}
    for sample in stream.done:
        expected = []
        while len(expected) < LONGEST and expected[-1:] != [END]:
            expected.append(token(key_of[sample.sample_id], 3 + len(expected)))
        assert sample.response == expected
        assert sample.log_probs == [-0.5 * one for one in expected]
        assert sample.truncated == (expected[-1] != END)
        assert sample.versions == sorted(sample.versions)


@pytest.fixture
def job(tmp_path: Path) -> TrainConfig:
    return config(tmp_path)


@pytest.mark.unit
def test_response_gets_its_tokens_per_version(job: TrainConfig) -> None:
    stream, group = Stream(job), answers(2, 7, 12, 90)
    stream.stream.add(group)
    for version in range(5):
        if version:
            assert not stream.done, "only whole groups are reported"
            stream.commit(version)
        stream.run()
    check_whole(stream, group)
    counts = {sample.sample_id: [*Counter(sample.versions).values()] for sample in stream.done}
    assert counts == {0: [2], 1: [4, 3], 2: [4, 4, 4], 3: [4] * 5}


@pytest.mark.unit
def test_commit_between_two_tokens_gives_no_tokens_away(job: TrainConfig) -> None:
    """A request that runs at a commit has its whole number of tokens of the new version."""
    stream, group = Stream(job), answers(90)
    stream.stream.add(group)
    stream.stream.step()  # one token of version 0
    stream.commit(1)
    stream.run()
    stream.commit(2)
    stream.run()
    assert not stream.done and not stream.inference.has_unfinished()
    stream.commit(3, due=[0])
    stream.run()
    check_whole(stream, group)
    assert Counter(stream.done[0].versions) == {0: 1, 1: 4, 2: 4, 3: 11}


@pytest.mark.unit
def test_due_group_has_no_limit(job: TrainConfig) -> None:
    stream, slow, due = Stream(job), answers(90, 6), answers(90, 9, group=1)
    stream.stream.go_on([1])
    stream.stream.add([*slow, *due])
    stream.run()
    assert stream.groups_done == {1}
    assert {version for sample in stream.done for version in sample.versions} == {0}
    stream.commit(1, due=[0])
    stream.run()
    check_whole(stream, slow, due)


@pytest.mark.unit
def test_group_that_becomes_due_goes_on_without_a_new_version(job: TrainConfig) -> None:
    """As in a step after which the weights stay as they were."""
    stream, group = Stream(job), answers(90)
    stream.stream.add(group)
    stream.run()
    assert not stream.done
    stream.stream.go_on([0])
    stream.run()
    check_whole(stream, group)


@pytest.mark.unit
def test_short_responses_do_not_wait_for_long_ones(job: TrainConfig) -> None:
    """The engine has room for three responses. Long ones leave it to short ones."""
    steps = {}
    for limit in (LIMIT, None):
        stream, long, short = Stream(job, limit), answers(90, 90, 90), answers(3, 3, 3, group=1)
        stream.stream.add([*long, *short])
        while 1 not in stream.groups_done:
            stream.stream.step()
        steps[limit] = stream.inference.num_steps
    assert steps == {LIMIT: LIMIT + 3, None: LONGEST + 3}


@pytest.mark.unit
def test_saved_rest_of_a_response_goes_on_in_another_process(job: TrainConfig, tmp_path: Path) -> None:
    groups = [answers(2, 90), answers(9, 3, 14, group=1)]
    first = Stream(job)
    for group in groups:
        first.stream.add(group)
    for _ in range(6):
        first.stream.step()
    assert not first.done
    first.stream.save(tmp_path / "engine_0", visits=[0, 1])
    second = Stream(job)
    second.stream.load([*itertools.chain(*groups)], [tmp_path / "engine_0"])
    for version in range(1, 6):
        for stream in (first, second):
            stream.run()
            stream.commit(version)
    for stream in (first, second):
        stream.run()
        check_whole(stream, *groups)
        assert max(max(Counter(sample.versions).values()) for sample in stream.done) == LIMIT
    assert {s.sample_id: s.versions for s in first.done} == {s.sample_id: s.versions for s in second.done}


@pytest.mark.unit
def test_aborted_stream_has_nothing_left(job: TrainConfig) -> None:
    stream = Stream(job)
    stream.stream.add(answers(90))
    stream.run()
    stream.stream.abort()
    stream.commit(1)
    assert not stream.stream.has_unfinished() and not stream.inference.has_unfinished()


@pytest.mark.unit
def test_engine_that_cannot_continue_is_refused(job: TrainConfig) -> None:
    with pytest.raises(ValueError, match=r"^--max-tokens-per-step \(4\): draws from a generator$"):
        Stream(job, cannot_continue="draws from a generator")
    Stream(job, limit=None, cannot_continue="draws from a generator")

"""With --max-tokens-per-step a response gets so many tokens per version of the weights, and then leaves the
engine's batch until the next version, unless its group is due.

    pytest tests/workers/test_partial_rollouts.py

The engine is a small one that computes each token from key and position, as the real engines draw.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.schema import StreamingConfig
from megarl.messages import decode
from megarl.workers.answer import Answer
from megarl.workers.request_stream import SavedAnswer
from tests.workers import small_engine
from tests.workers.small_engine import STOP_TOKEN

LONGEST, LIMIT, NUM_ROWS = 20, 4, 3


def token(key: int, tokens: Sequence[int]) -> int:
    """Return the token after these tokens of prompt and response. A response ends after `key` tokens."""
    return STOP_TOKEN if len(tokens) == 2 + key else 2 + (7 * key + len(tokens)) % 50


class Stream(small_engine.Stream):
    """A request stream with a limit per version, over an engine that has room for NUM_ROWS requests."""

    def __init__(self, limit: int | None = LIMIT, cannot_continue: str | None = None) -> None:
        job = small_engine.config(Path("unused"), LONGEST)
        streaming = StreamingConfig(staleness=2, max_tokens_per_step=limit)
        super().__init__(
            replace(job, streaming=streaming),
            max_running=NUM_ROWS,
            next_token=token,
            cannot_continue=cannot_continue,
        )

    def run(self) -> None:
        """Take steps until no response can get a token of this version."""
        self.stream.drain()

    def commit(self, version: int, due: Sequence[int] | None = None) -> None:
        self.engine.commit(version)
        self.stream.go_on(due)

    @property
    def groups_done(self) -> set[int]:
        return {sample.group for sample in self.samples}


def answers(*lengths: int, group: int = 0) -> list[Answer]:
    """Return a group of answers of these lengths, longer ones being truncated."""
    return [Answer(10 * group + index, 0, group, [5, 6, 7], length) for index, length in enumerate(lengths)]


def check_whole(stream: Stream, *groups: list[Answer]) -> None:
    """Check that each answer was reported once, with the tokens that an engine without limit samples."""
    assert Counter(sample.sample_id for sample in stream.samples) == Counter(
        answer.sample_id for group in groups for answer in group
    )
    key_of = {answer.sample_id: answer.key for group in groups for answer in group}
    for sample in stream.samples:
        expected = []
        while len(expected) < LONGEST and expected[-1:] != [STOP_TOKEN]:
            expected.append(token(key_of[sample.sample_id], [*sample.prompt, *expected]))
        assert sample.response == expected
        assert sample.log_probs == [-one / 8 for one in expected]
        assert sample.truncated == (expected[-1] != STOP_TOKEN)
        assert sample.versions == sorted(sample.versions)


@pytest.mark.unit
def test_response_gets_its_tokens_per_version() -> None:
    stream, group = Stream(), answers(2, 7, 12, 90)
    stream.stream.add(group)
    for version in range(5):
        if version:
            assert not stream.samples, "only whole groups are reported"
            stream.commit(version)
        stream.run()
    check_whole(stream, group)
    counts = {sample.sample_id: [*Counter(sample.versions).values()] for sample in stream.samples}
    assert counts == {0: [2], 1: [4, 3], 2: [4, 4, 4], 3: [4] * 5}


@pytest.mark.unit
def test_commit_between_two_tokens_gives_no_tokens_away() -> None:
    """A request that runs at a commit has its whole number of tokens of the new version."""
    stream, group = Stream(), answers(90)
    stream.stream.add(group)
    stream.stream.step()  # one token of version 0
    stream.commit(1)
    stream.run()
    stream.commit(2)
    stream.run()
    assert not stream.samples and not stream.inference.has_unfinished()
    stream.commit(3, due=[0])
    stream.run()
    check_whole(stream, group)
    assert Counter(stream.samples[0].versions) == {0: 1, 1: 4, 2: 4, 3: 11}


@pytest.mark.unit
def test_due_group_has_no_limit() -> None:
    stream, slow, due = Stream(), answers(90, 6), answers(90, 9, group=1)
    stream.stream.go_on([1])
    stream.stream.add([*slow, *due])
    stream.run()
    assert stream.groups_done == {1}
    assert {version for sample in stream.samples for version in sample.versions} == {0}
    stream.commit(1, due=[0])
    stream.run()
    check_whole(stream, slow, due)


@pytest.mark.unit
def test_group_that_becomes_due_goes_on_without_a_new_version() -> None:
    """As in a step after which the weights stay as they were."""
    stream, group = Stream(), answers(90)
    stream.stream.add(group)
    stream.run()
    assert not stream.samples
    stream.stream.go_on([0])
    stream.run()
    check_whole(stream, group)


@pytest.mark.unit
def test_short_responses_do_not_wait_for_long_ones() -> None:
    """The engine has room for three responses. Long ones leave it to short ones."""
    steps = {}
    for limit in (LIMIT, None):
        stream, long, short = Stream(limit), answers(90, 90, 90), answers(3, 3, 3, group=1)
        stream.stream.add([*long, *short])
        while 1 not in stream.groups_done:
            stream.stream.step()
        steps[limit] = stream.inference.num_steps
    assert steps == {LIMIT: LIMIT + 3, None: LONGEST + 3}


@pytest.mark.unit
def test_saved_rest_of_a_response_goes_on_in_another_process(tmp_path: Path) -> None:
    groups = [answers(2, 90), answers(9, 3, 14, group=1)]
    first = Stream()
    for group in groups:
        first.stream.add(group)
    for _ in range(6):
        first.stream.step()
    assert not first.samples
    first.stream.save(tmp_path / "engine_0", visits=[0, 1])
    second = Stream()
    second.stream.load([*itertools.chain(*groups)], [tmp_path / "engine_0"])
    for version in range(1, 6):
        for stream in (first, second):
            stream.run()
            stream.commit(version)
    for stream in (first, second):
        stream.run()
        check_whole(stream, *groups)
        assert max(max(Counter(sample.versions).values()) for sample in stream.samples) == LIMIT
    assert {s.sample_id: s.versions for s in first.samples} == {
        s.sample_id: s.versions for s in second.samples
    }


class SteppingEngine(small_engine.SmallEngine):
    """An engine that steps by itself: a pause comes after the step under way."""

    def pause(self) -> None:
        self.step()
        super().pause()


@pytest.mark.unit
def test_checkpoint_whose_pause_ends_a_request_at_its_limit_of_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is queued again for the new version, and has no new tokens yet."""
    monkeypatch.setattr(small_engine, "SmallEngine", SteppingEngine)
    groups, stream = [answers(90), answers(90, group=1)], Stream()
    for group in groups:
        stream.stream.add(group)
        stream.stream.step()
    stream.commit(1)
    stream.stream.step()
    stream.stream.save(tmp_path / "engine_0", visits=[0, 1])
    saved = {
        one.answer.sample_id: one.answer
        for one in decode((tmp_path / "engine_0").read_bytes(), list[SavedAnswer])
    }
    assert {name: answer.versions for name, answer in saved.items()} == {0: [0, 0, 1, 1], 10: [0, 1, 1]}
    for version in range(2, 8):
        stream.run()
        stream.commit(version)
    stream.run()
    check_whole(stream, *groups)


@pytest.mark.unit
def test_aborted_stream_has_nothing_left() -> None:
    stream = Stream()
    stream.stream.add(answers(90))
    stream.run()
    stream.stream.abort()
    stream.commit(1)
    assert not stream.stream.has_unfinished() and not stream.inference.has_unfinished()


@pytest.mark.unit
def test_engine_that_cannot_continue_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^--max-tokens-per-step \(4\): draws from a generator$"):
        Stream(cannot_continue="draws from a generator")
    Stream(limit=None, cannot_continue="draws from a generator")

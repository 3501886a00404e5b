"""Episodes that outlive a call: their tokens, versions, checkpoints and replays.

pytest tests/workers/test_episode_stream.py"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.episodes.environments import Reply, Sampled
from megarl.messages import decode
from megarl.rollout.draws import AnswerKeys
from megarl.rollout.replay_log import Admit, Commit, ReplayError, Turns, path_of, read_log
from megarl.workers import episode_stream
from megarl.workers.answer import Answer
from megarl.workers.open_episode import SavedEpisode
from megarl.workers.store import RolloutSample
from tests.workers.episode_job import CHAT, GROUP_SIZE, LIMITS, LONGEST, Job, Letters, Pool, answers, reply_of
from tests.workers.small_engine import whole_response


def played(answer: Answer, salt: str = "") -> tuple[list[int], list[int], int]:
    """Return first prompt, response and number of turns of an episode, played without a stream."""
    keys, texts = AnswerKeys(answer.key), []
    reply = reply_of(answer.row, [], salt)
    if reply.failure:
        return answer.prompt, whole_response(answer.key, answer.prompt)[:1], 0
    messages = [*reply.messages]
    first = tokens = CHAT.encode(messages)
    while True:
        response = whole_response(keys.next(tokens), tokens)[:LONGEST]
        tokens = [*tokens, *response]
        texts.append(CHAT.decode(response))
        messages.append({"role": "assistant", "content": texts[-1]})
        reply = reply_of(answer.row, texts, salt)
        if reply.done:
            return first, tokens[len(first) :], len(texts)
        tokens = [*tokens, *CHAT.suffix(messages, reply.messages, tokens[-1])]
        messages += reply.messages


def check(samples: Sequence[RolloutSample], *visits: int, salt: str = "") -> None:
    """Each episode of these groups is there once, with the tokens of one that was never interrupted."""
    expected = {answer.sample_id: answer for answer in answers(*visits)}
    assert sorted(sample.sample_id for sample in samples) == sorted(expected)
    for sample in samples:
        prompt, response, num_turns = played(expected[sample.sample_id], salt)
        assert (sample.prompt, sample.response) == (prompt, response)
        assert sample.episode.num_turns == num_turns
        assert sample.episode.reward == (0.5 * num_turns if num_turns else None)
        assert sample.num_sampled == len(sample.versions) == len(sample.log_probs)
        assert sample.versions == sorted(sample.versions)
        sampled = [index for start, end in _runs(sample) for index in sample.response[start:end]]
        assert sample.log_probs == [-token / 8 for token in sampled]


def _runs(sample: RolloutSample) -> list[tuple[int, int]]:
    ends = [0, *(at for hole in sample.holes for at in hole), len(sample.response)]
    return [*zip(ends[::2], ends[1::2], strict=True)]


@pytest.mark.parametrize("weight_update", ["recompute", "keep", "wait"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_no_token_is_too_old_however_slow_the_environments(tmp_path, staleness, weight_update):
    """The driver's buffer decides; 30 steps of 3 prompts, each trained on once."""
    num_mixed = 0
    for seed in range(2):
        job = Job(tmp_path / f"{seed}", seed, weight_update=weight_update)
        trained = []
        for step, _, _, samples in job.train(staleness, 30, longest=12):
            trained += samples
            for sample in samples:
                assert all(0 <= step - 1 - version <= staleness for version in sample.versions)
                num_mixed += len({*sample.versions}) > 1
        check(trained, *range(90))
        assert not job.stream.has_unfinished() and not job.pool.texts
    assert num_mixed > 10  # episodes do span versions, with `wait` too


def test_with_wait_each_answer_comes_from_one_version_and_episodes_may_span_several(tmp_path):
    job = Job(tmp_path, weight_update="wait", max_running=100)
    job.recorder.start(0)
    job.stream.add(answers(3, 7, 11))
    version = 0
    while job.stream.has_unfinished():
        job.step(5)
        job.stream.drain()
        version += 1
        job.engine.commit(version)
    check(job.samples, 3, 7, 11)
    check_versions_of_turns(job.samples)


def check_versions_of_turns(samples: Sequence[RolloutSample]) -> None:
    """Each turn comes from one version, and an episode from several."""
    for sample in samples:
        ends = 0
        for length in sample.episode.turn_lengths:
            assert len({*sample.versions[ends : ends + length]}) == 1
            ends += length
    assert any(len({*sample.versions}) > 1 for sample in samples)


def test_with_wait_a_turn_of_other_weights_begins_anew(tmp_path):
    before, after = (Job(tmp_path / f"{number}", weight_update="wait") for number in range(2))
    before.recorder.start(0)
    before.stream.add(answers(3, 7, 11))
    before.step(15)
    before.stream.save(tmp_path / "file", [3, 7, 11])
    saved = decode((tmp_path / "file").read_bytes(), list[SavedEpisode])
    assert any(one.finish_reason is None and one.answer.response for one in saved)
    after.inference.set_version(1)
    after.recorder.start(1)
    after.stream.load(answers(3, 7, 11), [tmp_path / "file"])
    after.finish()
    check(after.samples, 3, 7, 11)
    check_versions_of_turns(after.samples)


@pytest.mark.parametrize("seed", range(8))
def test_a_checkpoint_brings_the_environments_back_and_goes_on(tmp_path, seed):
    rng = random.Random(seed)
    visits = [*range(rng.randint(1, 9))]
    before = Job(tmp_path / "before", seed)
    before.recorder.start(0)
    before.stream.add(answers(*visits))
    before.step(rng.randrange(80))
    done = {sample.group for sample in before.samples}
    left = [visit for visit in visits if visit not in done or rng.random() < 0.5]
    before.stream.save(tmp_path / "file", left)
    saved = {
        one.answer.sample_id: one for one in decode((tmp_path / "file").read_bytes(), list[SavedEpisode])
    }
    after = [Job(tmp_path / f"after{number}", seed + number) for number in range(2)]
    for number, job in enumerate(after):
        job.inference.set_version(1)
        job.recorder.start(1)
        job.stream.load(answers(*left[number::2]), [tmp_path / "file"])
    for job in (before, *after):
        job.inference.set_version(1)
        job.finish()
    check(before.samples, *visits)  # the running job is not disturbed
    resumed = [sample for job in after for sample in job.samples]
    check(resumed, *left)
    whole = {sample.sample_id: sample for sample in before.samples}
    for sample in resumed:
        assert sample.versions == whole[sample.sample_id].versions
        assert sample.episode == whole[sample.sample_id].episode
        one = saved[sample.sample_id]
        got = [version for versions in one.answer_versions for version in versions]
        assert sample.versions[: len(got)] == got  # nothing that was saved is sampled again
    assert sum(job.pool.num_opened for job in after) == sum(
        one.finish_reason is None for one in saved.values()
    )


def test_a_checkpoint_knows_which_episodes_are_only_scored(tmp_path):
    """As ReMax's greedy answers: a finished one of a checkpoint must not be trained on."""
    asked = [replace(answer, greedy=answer.sample_id % 2 == 1) for answer in answers(*range(6))]
    before, after = Job(tmp_path / "before"), Job(tmp_path / "after", 1)
    for job in (before, after):
        job.recorder.start(0)
    before.stream.add(asked)
    before.step(40)
    before.stream.save(tmp_path / "file", range(6))
    saved = decode((tmp_path / "file").read_bytes(), list[SavedEpisode])
    assert {one.answer.greedy for one in saved if one.finish_reason is not None} == {False, True}
    after.stream.load(asked, [tmp_path / "file"])
    after.finish()
    assert {sample.sample_id: sample.trained for sample in after.samples} == {
        answer.sample_id: not answer.greedy for answer in asked
    }


@pytest.mark.parametrize("of_agents", [False, True])
def test_an_episode_that_cannot_be_brought_back_begins_anew_and_is_named(tmp_path, caplog, of_agents):
    visits = [1, 2, 3, 6, 7, 10]
    before = Job(tmp_path / "before", 3)
    before.recorder.start(0)
    before.stream.add(answers(*visits))
    before.step(60)
    before.stream.save(tmp_path / "file", visits)
    saved = decode((tmp_path / "file").read_bytes(), list[SavedEpisode])
    has_begun = {one.answer.sample_id for one in saved if one.finish_reason is None and one.events}
    finished = {one.answer.sample_id for one in saved if one.finish_reason is not None}
    assert has_begun and finished
    salt = "" if of_agents else "!"
    after = Job(tmp_path / "after", 4, of_agents=of_agents, salt=salt)
    after.inference.set_version(1)
    after.recorder.start(1)
    after.stream.load(answers(*visits), [tmp_path / "file"])
    after.finish()
    assert len(after.samples) == GROUP_SIZE * len(visits)
    for sample in after.samples:
        if sample.sample_id not in finished:
            assert {*sample.versions} == {1}
            assert sample.response == played(answers(sample.group)[sample.sample_id % 2], salt)[1]
    lines = [
        re.match(r"(\d+) open episodes begin anew: (.*)\. Samples: (.*)", one) for one in caplog.messages
    ]
    named = [int(sample) for line in lines for sample in line[3].split(", ")]
    assert sorted(named) == sorted(has_begun) and sum(int(line[1]) for line in lines) == len(named)
    why = (
        "an agent cannot be brought back" if of_agents else "its environment replied ([{'role': 'user', 'con"
    )
    assert all(line[2].startswith(why) for line in lines)


def test_episodes_that_are_longer_than_the_context_now_begin_anew(tmp_path):
    """Those that fit go on, and end at the lower limit."""
    before = Job(tmp_path / "before", 3)
    before.recorder.start(0)
    before.stream.add(answers(3, 7, 10, 11))
    before.step(45)
    before.stream.save(tmp_path / "file", [3, 7, 10, 11])
    saved = decode((tmp_path / "file").read_bytes(), list[SavedEpisode])
    limit = sorted(len(one.answer.prompt) + len(one.answer.response) for one in saved)[4]
    after = Job(tmp_path / "after", 4, limits=replace(LIMITS, max_context_length=limit))
    after.inference.set_version(1)
    after.recorder.start(1)
    after.stream.load(answers(3, 7, 10, 11), [tmp_path / "file"])
    after.finish()
    assert len(after.samples) == 8
    first_versions = {sample.versions[0] for sample in after.samples}
    assert first_versions == {0, 1} and all(
        len(one.prompt) + len(one.response) <= limit for one in after.samples
    )


def test_an_episode_whose_prompt_differs_now_begins_anew(tmp_path, caplog, monkeypatch):
    before, after = Job(tmp_path / "before", 3), Job(tmp_path / "after", 4)
    before.recorder.start(0)
    before.stream.add(answers(3, 7))
    before.step(12)
    before.stream.save(tmp_path / "file", [3, 7])
    after.inference.set_version(1)
    after.recorder.start(1)
    monkeypatch.setattr(Letters, "render", lambda self, messages, *given: Letters.template(messages) + "]")
    after.stream.load(answers(3, 7), [tmp_path / "file"])
    after.finish()
    check(after.samples, 3, 7)
    assert all({*sample.versions} == {1} for sample in after.samples)
    assert len(caplog.messages) == 4 and all("its prompt differs now" in line for line in caplog.messages)


def run(job: Job) -> list[tuple]:
    """Run eight steps with two evaluations. Returns what the engine computed in each of its steps."""

    def evaluate(step: int) -> None:
        if step % 3 == 0:
            record = Admit(step=step + 1, version=step, visits=(3, 4))
            held_out = job.stream.sample(answers(3, 4, purpose="eval"), job.recorder.taking_effect(record))
            check(held_out, 3, 4)

    return job.run(range(1, 9), longest=40, after_step=evaluate)


@pytest.mark.parametrize("of_agents", [False, True])
def test_a_replay_repeats_the_replies_at_their_engine_steps_without_the_environments(tmp_path, of_agents):
    """Also those of agents, with the requests that were refused."""
    first = Job(tmp_path / "run", 0, of_agents=of_agents)
    computed = run(first)
    assert bool(first.pool.refused) == of_agents
    assert run(Job(tmp_path / "free", 1)) != computed
    for seed in range(3):
        again = Job(tmp_path / f"{seed}", seed + 5, tmp_path / "run", of_agents=of_agents, salt="never asked")
        assert run(again) == computed
        assert again.pool.num_opened == 0
        assert read_log(tmp_path / f"{seed}", "rollout_0") == read_log(tmp_path / "run", "rollout_0")
        assert [(one.sample_id, one.versions, one.episode) for one in again.samples] == [
            (one.sample_id, one.versions, one.episode) for one in first.samples
        ]


@pytest.mark.parametrize("of_agents", [False, True])
def test_a_replay_repeats_a_run_that_was_killed_and_resumed(tmp_path, of_agents):
    """The run goes on from the checkpoint of step 3, where agents begin anew; its replay never stops."""

    options = {"of_agents": of_agents, "max_running": 1}
    killed = Job(tmp_path / "run", 0, **options)
    computed = killed.run(range(1, 4), longest=40)
    left, before, num_steps = killed.save(tmp_path / "file"), [*killed.samples], len(computed)
    killed.step(7)
    resumed = Job(tmp_path / "run", 1, **options)
    resumed.inference.set_version(3)
    resumed.recorder.start(3)
    resumed.stream.load(answers(*left), [tmp_path / "file"])
    after = resumed.run(range(4, 7), longest=40)
    again = Job(tmp_path / "again", 2, replay=tmp_path / "run", **options)
    repeated = again.run(range(1, 4), longest=40)
    assert again.save(tmp_path / "other") == left
    more = again.run(range(4, 7), longest=40)
    assert repeated[:num_steps] + more == computed[:num_steps] + after
    expected = [*before, *resumed.samples]
    assert [(one.sample_id, one.versions, one.episode) for one in again.samples] == [
        (one.sample_id, one.versions, one.episode) for one in expected
    ]
    log = path_of(tmp_path / "run", "rollout_0").read_text()
    assert ("null" in log) == of_agents and len(left) > 1


def test_after_the_last_record_of_a_replay_the_environments_are_brought_back(tmp_path):
    run(Job(tmp_path / "run", 0))
    again = Job(tmp_path / "again", 5, replay=tmp_path / "run")
    run(again)
    left = again.stream.has_unfinished()
    again.finish()
    assert left and again.pool.num_opened > 0
    check(again.samples, *range(2, 18))


def test_a_reply_that_no_episode_waits_for_ends_the_replay(tmp_path):
    run(Job(tmp_path / "run", 0))
    path = path_of(tmp_path / "run", "rollout_0")
    lines = path.read_text().splitlines()
    at = next(at for at, line in enumerate(lines) if '"kind":"turns"' in line and '"tool"' in line)
    lines.insert(at, lines[at])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ReplayError, match="an episode here is at no such reply"):
        run(Job(tmp_path / "again", 5, replay=tmp_path / "run"))


def test_a_commit_between_two_replies_keeps_its_place_in_the_log(tmp_path):
    run(Job(tmp_path / "run", 2))
    records = read_log(tmp_path / "run", "rollout_0")
    kinds = [type(record) for record in records]
    assert kinds.count(Turns) > 30 and kinds.count(Commit) == 8
    steps = [record.engine_step for record in records[1:]]
    assert steps == sorted(steps)
    version = 0
    for record in records:
        version = record.version if isinstance(record, Commit) else version
        assert not isinstance(record, Turns) or record.step == version


class OneByOne(Pool):
    """Environments that reply at once, of which a look finds one. With agents: they ask for a second conversation
    again and again."""

    def open(self, row: Mapping[str, Any]) -> int:
        number = super().open(row)
        self.due[number] = 0
        return number

    def step(self, episode: int, text: str, sampled: Sampled) -> None:
        super().step(episode, text, sampled)
        self.due[episode] = 0

    def refuse(self, reply: Reply, code: str, message: str, is_final: bool = False) -> bool:
        super().refuse(reply, code, message, is_final)
        self.refused.clear()
        self.due[reply.episode] = 0
        return True

    def replies(self, timeout_s: float) -> list[Reply]:
        waiting, self.due = self.due, dict([*self.due.items()][:1])
        try:
            return super().replies(timeout_s)
        finally:
            self.due = {number: 0 for number in [*waiting][1:]}


def test_no_seat_is_free_in_a_step_while_a_reply_waits(tmp_path):
    """The engine has all 8 episodes in its first step, and later those whose environments have replied by then."""
    job = Job(tmp_path, max_running=8, pool=OneByOne(random.Random(0)))
    job.recorder.start(0)
    step, num_requests = job.inference.step, []

    def watched() -> None:
        assert not job.pool.due
        num_requests.append(len(job.inference.requests))
        step()

    job.inference.step = watched
    job.stream.add(answers(0, 1, 2, 3))
    job.finish()
    check(job.samples, 0, 1, 2, 3)
    assert num_requests[0] == 8 and len(num_requests) > LONGEST
    records = [record for record in read_log(tmp_path, "rollout_0") if isinstance(record, Turns)]
    assert [record.engine_step for record in records[:8]] == [0] * 8  # one record per look


def test_an_agent_that_asks_for_ever_does_not_hold_the_engine_up(tmp_path):
    """Each of its requests is refused. Meanwhile the engine takes its steps."""
    job = Job(tmp_path, of_agents=True, pool=OneByOne(random.Random(0), of_agents=True))
    job.recorder.start(0)
    job.stream.add(answers(1, 2))  # those of row 1 ask for ever
    for _ in range(100):
        job.stream.step()
    assert {sample.group for sample in job.samples} == {2} and len(job.stream._open) == GROUP_SIZE


def test_only_the_time_between_steps_counts_as_standing_still(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(episode_stream, "time", SimpleNamespace(monotonic=lambda: now))
    job = Job(tmp_path)
    job.recorder.start(0)
    step = job.inference.step

    def slow() -> None:
        nonlocal now
        now += 5.0  # the engine serves
        step()

    job.inference.step = slow
    now += 100.0  # before the first episode
    job.stream.add(answers(3))
    assert job.pool.stood_still == 100.0
    for _ in range(4):
        now += 7.0  # a command of the driver
        job.stream.step()
    assert job.pool.stood_still == 100.0 + 4 * 7.0 and now > 4 * 7.0 + 100.0


def test_held_out_episodes_do_not_disturb_those_of_training(tmp_path):
    job = Job(tmp_path, 1)
    job.recorder.start(0)
    job.stream.add(answers(0, 1, 2, 3, 5))
    job.step(3)
    check(job.stream.sample(answers(2, 3, purpose="eval"), nullcontext()), 2, 3)
    job.finish()
    check(job.samples, 0, 1, 2, 3, 5)


def test_the_episodes_of_a_lost_engine_go_on_in_another(tmp_path):
    job, other = Job(tmp_path / "job", 1), Job(tmp_path / "other", 2)
    job.lose_engine(other, tmp_path / "file")
    assert not job.pool.texts
    check([*job.samples, *other.samples], *range(6))

"""Agents' episodes that are trees and outlive a call: each token is trained on once, in time, and can be repeated.

    pytest tests/workers/test_branching_stream.py

The agents are objects of this file, which ask at random; everything else is that of episode_job.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.episodes.environments import Reply, Request, Sampled
from megarl.invariants import check_samples, check_versions
from megarl.messages import decode
from megarl.rollout.draws import AnswerKeys
from megarl.rollout.replay_log import Checkpoint, read_log
from megarl.workers.answer import Answer
from megarl.workers.open_episode import SavedEpisode
from megarl.workers.store import RolloutSample
from tests.workers.small_engine import SmallEngine, whole_response
from tests.workers.episode_job import GROUP_SIZE, LIMITS, Job, Pool, answers

BRANCHING = replace(LIMITS, max_turns=12, max_branches=6)
MAX_TOKENS = 5  # of an answer, where an agent asks for fewer than the job allows


@dataclass(eq=False)
class Agent:
    """One agent: what it will do, and what it has got."""

    rng: random.Random
    num_requests: int
    """Requests that it sends."""
    has_patience: bool
    """Whether it ends after its last answer only."""
    fails: bool
    due: int = 0
    """Looks until it does something."""
    num_sent: int = 0
    waiting: dict[int, int] = field(default_factory=dict)
    """Request -> answers that are missing."""
    held: dict[int, list[Sampled]] = field(default_factory=dict)
    known: list[Sampled] = field(default_factory=list)
    """Answers that it has got."""


class Agents(Pool):
    """Agents that ask for several answers, go on from any, begin anew, and have several requests at a time.

    Args:
        rng: chooses what they do, and when."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, of_agents=True)
        self.agents: dict[int, Agent] = {}
        self.num_refused = 0

    def open(self, row: Mapping[str, Any]) -> int:
        number, rng = self.num_opened, random.Random(self.rng.random())
        self.num_opened += 1
        self.agents[number] = Agent(rng, rng.choice([0, 1, 2, 3, 6]), rng.random() < 0.7, rng.random() < 0.1)
        self.agents[number].due = rng.randrange(4)
        return number

    def step(self, episode: int, text: str, sampled: Sampled) -> None:
        agent, request = self.agents[episode], sampled.request
        agent.held.setdefault(request, []).append(sampled)
        agent.waiting[request] -= 1
        if not agent.waiting[request]:  # all answers of a request come together
            del agent.waiting[request]
            agent.known += agent.held.pop(request)
            agent.due = min(agent.due, agent.rng.choice([0, 1, 2, 30]))

    def refuse(self, reply: Reply, code: str, message: str, is_final: bool = False) -> bool:
        assert code in ("too_many_branches", "context_length_exceeded"), (code, message)
        agent = self.agents[reply.episode]
        del agent.waiting[reply.request.number]
        agent.due, self.num_refused = 0, self.num_refused + 1
        return True

    def end(self, episode: int) -> None:
        del self.agents[episode]

    def replies(self, timeout_s: float) -> list[Reply]:
        found = []
        for number, agent in self.agents.items():
            agent.due -= 1
            while agent.due < 0 and (reply := self._act(number, agent)) is not None:
                found.append(reply)  # an agent may send two requests at once
        return found

    def _act(self, number: int, agent: Agent) -> Reply | None:
        rng = agent.rng
        if agent.num_sent == agent.num_requests:
            if agent.waiting and agent.has_patience:
                return None
            agent.due = 1_000_000
            if agent.fails or not agent.known:
                return Reply(number, failure="planted", cause="died")
            return Reply(number, reward=float(len(agent.known)), done=True)
        agent.due = rng.choice([-1, 0, 0, 1, 3, 9])
        if agent.num_sent and not agent.known and rng.random() < 0.7:
            return None  # waits for its first answer
        request, agent.num_sent = agent.num_sent, agent.num_sent + 1
        count = rng.choice([1, 1, 1, 2, 3])
        agent.waiting[request] = count
        limit = rng.choice([None, None, MAX_TOKENS])
        messages = [{"role": "tool", "content": f"{rng.randrange(3)}"}]
        before, kind = rng.choice(agent.known or [None]), rng.random()
        if before is None or kind < 0.2:  # another conversation, or the same one once more
            return Reply(number, messages, request=Request(request, None, count), max_tokens=limit)
        if kind < 0.4:
            ids = [*before.prompt, *before.ids, 40 + rng.randrange(3)]
            return Reply(number, request=Request(request, None, count, ids), max_tokens=limit)
        return Reply(number, messages, request=Request(request, before.turn, count), max_tokens=limit)


class Told:
    """What the engine was asked for, and what the agents were told, by the name of the episode.

    Each turn of an episode has a key of its own, so a request that is computed anew does not count again. What was
    before an episode has begun anew is forgotten."""

    def __init__(self, job: Job) -> None:
        self.asked: dict[str, dict[int, tuple[list[int], int]]] = {}  # name -> key -> prompt, limit
        self.sampled: dict[str, list[tuple[list[int], list[int]]]] = {}  # name -> (prompt, ids) of answers
        self.at_once = 0  # most requests of one episode that the engine has had at a time
        add, answered, anew = job.inference.add, job.stream._play.answered, job.stream._begin_episode_anew

        def watched_add(requests) -> None:
            for one in requests:
                turns = self.asked.setdefault(one.id.rpartition("/")[0], {})
                turns.setdefault(one.key, (one.prompt, one.max_tokens))
            add(requests)
            running = Counter(one.request.id.rpartition("/")[0] for one in job.inference.requests)
            self.at_once = max(self.at_once, *running.values(), 0)

        def watched_answer(answer) -> None:
            open_ones = {one.index: one for one in job.stream._open.values()}
            one = open_ones[answer.index]
            prompt = one.episode.session.turns[answer.number].prompt
            self.sampled.setdefault(one.name, []).append((prompt, answer.token_ids))
            answered(answer)

        def watched_anew(one) -> None:
            self.asked.pop(one.name, None)
            self.sampled.pop(one.name, None)
            anew(one)

        job.inference.add, job.stream._play.answered = watched_add, watched_answer
        job.stream._begin_episode_anew = watched_anew


class OwnSteps(SmallEngine):
    """An engine that takes steps by itself, up to three whenever it is asked, and reports them with the next ones.

    Args:
        rng: chooses how many."""

    process = "engine"
    computing = "compute"

    def __init__(self, max_running: int, rng: random.Random) -> None:
        super().__init__(max_running)
        self.rng, self.held_at, self.on_their_way = rng, None, []

    def step(self) -> None:
        self._finished += self.on_their_way
        self.on_their_way = []
        for _ in range(self.rng.randrange(4)):
            if self.held_at is None or self.num_steps < self.held_at:
                self.compute()

    def compute(self) -> None:
        known = len(self._finished)
        super().step()
        self.on_their_way += self._finished[known:]
        del self._finished[known:]

    def pause(self) -> None:
        super().pause()
        self._finished += self.on_their_way
        self.on_their_way = []

    def abort(self, ids: Sequence[str]) -> None:
        super().abort(ids)
        self.on_their_way = [output for output in self.on_their_way if output.id not in ids]

    def hold(self, step: int | None) -> None:
        assert step is None or step >= self.num_steps
        self.held_at = step


def masked(sample: RolloutSample) -> list[int]:
    """Return the places in the response that are trained on."""
    holes = {at for start, end in sample.holes for at in range(start, end)}
    return [at for at in range(len(sample.response)) if at not in holes]


def check(
    samples: Sequence[RolloutSample],
    told: Told,
    *visits: int,
    purpose: str = "train",
    without: Collection[int] = (),
) -> None:
    """Each episode of these groups is there once and whole, and each answer is in one mask, after the ids that the
    engine has seen before it.

    Args:
        without: episodes of these groups that are not among the samples."""
    of_episode: dict[int, list[RolloutSample]] = {}
    for sample in samples:
        of_episode.setdefault(sample.first_id, []).append(sample)
    asked = answers(*visits, purpose=purpose)
    expected = {answer.sample_id: answer for answer in asked if answer.sample_id not in without}
    assert sorted(of_episode) == sorted(expected)
    for first_id, answer in expected.items():
        mine, name = sorted(of_episode[first_id], key=lambda one: one.branch), f"{purpose}/{first_id}"
        assert [one.branch for one in mine] == [*range(mine[0].num_branches)] == [*range(len(mine))]
        assert {(one.num_branches, one.truncated, one.trained) for one in mine} == {
            (len(mine), mine[0].truncated, True)
        }
        check_draws(answer, told, name)
        result = mine[0].episode
        assert result is not None and all(one.episode is None for one in mine[1:])
        trained = []
        for one in mine:
            whole = [*one.prompt, *one.response]
            trained += [(*whole[: len(one.prompt) + at + 1],) for at in masked(one)]
            assert one.log_probs == [-one.response[at] / 8 for at in masked(one)]
            assert one.versions == sorted(one.versions) and len(one.versions) == len(masked(one))
        if not result.num_turns:  # a single masked token after the row's own prompt
            assert result.reward is None and [one.prompt for one in mine] == [answer.prompt]
            assert len(trained) == 1
            continue
        given = told.sampled[name]
        assert len(given) == result.num_turns == len(result.turn_lengths)
        wanted = [(*prompt, *ids[: n + 1]) for prompt, ids in given for n in range(len(ids))]
        assert sorted(trained) == sorted(wanted)


def check_draws(answer: Answer, told: Told, name: str) -> None:
    """Each answer draws by the ids before it and the number of earlier answers to them, as in synchronous
    training."""
    keys, asked = AnswerKeys(answer.key), told.asked.get(name, {})
    turns = [(key, prompt) for key, (prompt, _) in asked.items()]
    if told.sampled.get(name):
        assert [key for key, _ in turns] == [keys.next(prompt) for _, prompt in turns]
    limit_of = {key: limit for key, (_, limit) in asked.items()}
    possible = [(prompt, whole_response(key, prompt)[: limit_of[key]]) for key, prompt in turns]
    for prompt, ids in told.sampled.get(name, []):
        possible.remove((prompt, ids))


def job_of(
    folder: Path, seed: int, replay: Path | None = None, steps_by_itself: bool = False, **options: Any
) -> Job:
    pool = Agents(random.Random(f"agents {seed}"))
    engine = OwnSteps(4, random.Random(f"engine {seed}")) if steps_by_itself else SmallEngine(4)
    options = {"limits": BRANCHING, "engine": engine, **options}
    return Job(folder, seed, replay, of_agents=True, pool=pool, **options)


SCHEDULES = [("recompute", 1), ("wait", 2), ("keep", 2), ("recompute", 2), ("keep", 1), ("wait", 1)]


@pytest.mark.parametrize(
    "weight_update, staleness",
    [*SCHEDULES[:2], *(pytest.param(*one, marks=pytest.mark.nightly) for one in SCHEDULES[2:])],
)
def test_each_token_of_a_tree_is_trained_on_once_and_in_time(tmp_path, staleness, weight_update):
    """The driver's buffer decides which groups a step takes; some checkpoints between. 20 steps of 3 prompts. The limit
    of tokens holds for each branch."""
    num_mixed = num_branches = at_once = num_refused = 0
    for seed, longest in enumerate((400, 30)):  # tokens of a conversation
        limits = replace(BRANCHING, max_context_length=longest)
        job = job_of(tmp_path / f"{seed}", seed, weight_update=weight_update, limits=limits)
        told = Told(job)
        trained = []
        for step, buffer, groups, samples in job.train(staleness, 20, longest=20):
            records = [record for group in groups for record in group.samples.values()]
            assert len(groups) == 3  # of prompts, however many samples they have
            check_samples(records, {group.visit: GROUP_SIZE for group in groups}, longest)
            check_versions(records, step, staleness)
            trained += samples
            num_mixed += sum(len({*one.versions}) > 1 for one in samples)
            num_branches += sum(one.branch > 0 for one in samples)
            if job.rng.random() < 0.3:
                with job.recorder.taking_effect(Checkpoint(step=step)):
                    job.stream.save(tmp_path / "file", [group.visit for group in buffer.groups])
        check(trained, told, *range(60))
        assert not job.stream.has_unfinished() and not job.pool.agents and not job.stream._answers
        at_once, num_refused = max(at_once, told.at_once), num_refused + job.pool.num_refused
    assert num_mixed > 10 and num_branches > 40 and at_once > 3 and num_refused > 0


def run(job: Job, steps: Sequence[int], path: Path | None = None) -> list[tuple]:
    """Run some steps, with a checkpoint after step 3. Returns what the engine computed in each of its steps."""
    return job.run(steps, 25, lambda step: job.save(path) if step == 3 and path is not None else None)


def by_id(sample: RolloutSample) -> int:
    return sample.sample_id


def facts(samples: Sequence[RolloutSample]) -> list[tuple]:
    return [
        (one.sample_id, one.branch, one.num_branches, one.prompt, one.response, one.holes, one.versions)
        for one in samples
    ] + [one.episode for one in samples]


@pytest.mark.parametrize("steps_by_itself", [False, True])
def test_a_replay_of_branching_agents_asks_none_and_may_be_resumed(tmp_path, steps_by_itself):
    """The replay that goes on from the checkpoint of step 3 is in the middle of episodes with several turns."""
    num_at_once = 0
    for seed in range(4):
        runs = [tmp_path / f"{name}_{seed}" for name in ("first", "again", "resumed")]
        first, again, resumed = (
            job_of(folder, seed + 50 * at, runs[0] if at else None, steps_by_itself)
            for at, folder in enumerate(runs)
        )
        computed = run(first, range(1, 8), tmp_path / "other")
        repeated = [*run(again, range(1, 4), tmp_path / "file")]
        before, saved = len(again.samples), decode((tmp_path / "file").read_bytes(), list[SavedEpisode])
        repeated += run(again, range(4, 8))
        assert repeated == computed and again.pool.num_opened == 0
        assert facts(again.samples) == facts(first.samples)
        assert read_log(runs[1], "rollout_0") == read_log(runs[0], "rollout_0")
        resumed.inference.set_version(3)
        resumed.recorder.start(3)
        groups = sorted({one.answer.group for one in saved})
        resumed.stream.load(answers(*groups), [tmp_path / "file"])
        run(resumed, range(4, 8))
        assert facts(resumed.samples) == facts(first.samples[before:])
        assert resumed.pool.num_opened == 0
        num_at_once += sum(one.finish_reason is None and bool(one.further) for one in saved)
    assert num_at_once > 2


@pytest.mark.parametrize("steps_by_itself", [False, True])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 8))])
def test_after_a_checkpoint_agents_begin_anew_and_a_replay_repeats_that(
    tmp_path, caplog, seed, steps_by_itself
):
    path, how = tmp_path / "file", {"steps_by_itself": steps_by_itself}
    killed = job_of(tmp_path / "run", seed, **how)
    computed = [*killed.run(range(1, 4), 25)]
    groups, before = killed.save(path), [*killed.samples]
    killed.step(7)
    resumed = job_of(tmp_path / "run", 50 + seed, **how)
    told = Told(resumed)
    resumed.inference.set_version(3)
    resumed.recorder.start(3)
    resumed.stream.load(answers(*groups), [path])
    saved = decode(path.read_bytes(), list[SavedEpisode])
    finished = {one.answer.sample_id: one for one in saved if one.finish_reason is not None}
    after = [*run(resumed, range(4, 7))]
    resumed.finish()
    mine = [one for one in resumed.samples if one.first_id not in finished]
    kept = [one for one in resumed.samples if one.first_id in finished]
    assert Counter(one.first_id for one in kept) == {i: 1 + len(one.further) for i, one in finished.items()}
    assert all(min(one.versions) >= 3 for one in mine)
    check(mine, told, *groups, *range(8, 14), without=finished)
    lasts = [one.events[-1][0] for one in saved if one.finish_reason is None and one.events]
    num_anew = sum(
        reply is None or reply.failure is None for reply in lasts
    )  # a failure only lacks its token
    (line,) = [text for text in caplog.messages if "begin anew" in text] or [""]
    assert (
        line.startswith(f"{num_anew} open episodes begin anew: an agent cannot be brought back")
        or not num_anew
    )
    again = job_of(tmp_path / "again", 70 + seed, tmp_path / "run", **how)
    repeated = [*run(again, range(1, 4), tmp_path / "other")]
    assert repeated + run(again, range(4, 7)) == computed + after
    done = {one.sample_id for one in again.samples}
    expected = [one for one in [*before, *resumed.samples] if one.sample_id in done]
    # groups that end together may be reported in another order, as the resumed job began with the finished ones
    assert facts(sorted(again.samples, key=by_id)) == facts(sorted(expected, key=by_id))


def test_finished_episodes_of_a_checkpoint_keep_their_branches_and_are_not_trained_on_if_greedy(tmp_path):
    before = job_of(tmp_path / "before", 4)
    before.recorder.start(0)
    asked = [replace(one, greedy=one.sample_id % 2 == 1) for one in answers(*range(8))]
    before.stream.add(asked)
    while not any(sample.branch for sample in before.samples):
        before.step(1)
    before.stream.save(tmp_path / "file", range(8))
    before.stream.save(tmp_path / "file", range(8))  # a second time: requests have begun anew since
    saved = decode((tmp_path / "file").read_bytes(), list[SavedEpisode])
    finished = {one.answer.sample_id: one for one in saved if one.finish_reason is not None}
    assert any(one.further for one in finished.values()) and len(finished) < 16
    after = job_of(tmp_path / "after", 5)
    after.inference.set_version(1)
    after.recorder.start(1)
    after.stream.load(asked, [tmp_path / "file"])
    after.finish()
    before.finish()
    assert sorted({one.first_id for one in after.samples}) == [*range(16)]
    assert all(one.trained == (one.first_id % 2 == 0) for one in after.samples)
    was = {one.sample_id: one for one in before.samples}
    for one in after.samples:
        if one.first_id in finished:
            assert facts([one]) == facts([was[one.sample_id]]) and one.digest == was[one.sample_id].digest


def test_the_branching_episodes_of_a_lost_engine_begin_anew_in_another(tmp_path):
    job, other = job_of(tmp_path / "job", 1), job_of(tmp_path / "other", 2)
    job.lose_engine(other, tmp_path / "file")
    assert not job.pool.agents
    ids = Counter(sample.sample_id for sample in (*job.samples, *other.samples))
    assert {*ids.values()} == {1}
    whole = {one.first_id: one.num_branches for one in (*job.samples, *other.samples)}
    assert sorted(whole) == [*range(12)] and sum(whole.values()) == len(ids)


def test_held_out_trees_are_whole_and_do_not_disturb_those_of_training(tmp_path):
    job = job_of(tmp_path, 3)
    told = Told(job)
    job.recorder.start(0)
    job.stream.add(answers(0, 1, 2))
    job.step(5)
    held_out = job.stream.sample(answers(2, 3, purpose="eval"), nullcontext())
    check(held_out, told, 2, 3, purpose="eval")
    job.finish()
    check(job.samples, told, 0, 1, 2)


def test_turns_that_end_with_a_stop_string_begin_anew_and_keep_it(tmp_path, monkeypatch):
    """In the job that saves them, and in the one that loads them. The others go on after their saved tokens."""
    act = Agents._act

    def asks(self, number, agent):
        reply = act(self, number, agent)
        if reply is None or reply.request is None or reply.request.number % 2:
            return reply
        return replace(reply, how={"stop": [f"end {reply.request.number}"]})

    monkeypatch.setattr(Agents, "_act", asks)
    before, after = job_of(tmp_path / "before", 6), job_of(tmp_path / "after", 7)
    before.recorder.start(0)
    before.stream.add(answers(*range(4)))
    stops: dict[int, tuple[list[int], list[str]]] = {}  # key -> prompt and stop strings of a turn
    add = before.inference.add

    def watched_add(requests) -> None:
        for one in requests:
            stops.setdefault(one.key, (one.prompt, [*one.stop]))
        add(requests)

    before.inference.add = watched_add
    while len({len(one.request.stop) for one in before.inference.requests if one.tokens}) < 2:
        before.step(1)
    running = {one.request.key: len(one.tokens) for one in before.inference.requests}
    before.stream.save(tmp_path / "file", range(4))
    after.inference.set_version(before.inference.version)
    after.recorder.start(before.inference.version)
    after.stream.load(answers(*range(4)), [tmp_path / "file"])
    for job in (before, after):
        assert {one.request.key for one in job.inference.requests} == running.keys()
        for one in job.inference.requests:
            prompt, stop = stops[one.request.key]
            num_kept = 0 if stop else running[one.request.key]
            assert [*one.request.stop] == stop and one.request.prompt[: len(prompt)] == prompt
            assert len(one.request.prompt) == len(prompt) + num_kept
    assert any(running[key] for key, (_, stop) in stops.items() if stop and key in running)

"""Requests that outlive a call: groups are reported whole and once, and a checkpoint loses and doubles
nothing.

    pytest tests/workers/test_request_stream.py

The stream, the engine's base class and the sample table are the real ones, around the engine of
small_engine.py."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.schema import StreamingConfig
from megarl.messages import decode, encode
from megarl.rollout.requests import Request
from megarl.runtime.abort import Aborted
from megarl.workers.pinned_engine import held_out
from megarl.workers.answer import Answer
from megarl.workers.request_stream import SavedAnswer
from megarl.workers.store import RolloutSample
from tests.workers import small_engine
from tests.workers.small_engine import MAX_RESPONSE, STOP_TOKEN, experts_of, whole_response

GROUP_SIZE = 3
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 7}


def make_answer(visit: int, index: int) -> Answer:
    sample_id = GROUP_SIZE * visit + index
    prompt = [2 + visit % 40, *range(3, 3 + visit % 4)]
    return Answer(sample_id, 100 + visit, visit, prompt, key=7 * sample_id + 1)


def answers(*visits: int) -> list[Answer]:
    return [make_answer(visit, index) for visit in visits for index in range(GROUP_SIZE)]


LONG = [
    visit
    for visit in range(50)
    if min(len(whole_response(one.key, one.prompt)) for one in answers(visit)) > 4
]
"""Visits whose responses all have five tokens or more."""


class Stream(small_engine.Stream):
    """A stream whose groups have GROUP_SIZE samples."""

    def __init__(
        self,
        folder: Path,
        stop: Sequence[str] = (),
        max_response_length: int = MAX_RESPONSE,
        weight_update: str = "recompute",
        **options: object,
    ) -> None:
        job = small_engine.config(folder, max_response_length, stop=tuple(stop))
        streaming = StreamingConfig(staleness=1, weight_update=weight_update)
        super().__init__(replace(job, streaming=streaming), **options)

    @property
    def groups(self) -> list[int]:
        """Reported groups, in their order."""
        return [of_group[0].group for report in self.reports for of_group in by_group(report)]


def by_group(report: list[RolloutSample]) -> list[list[RolloutSample]]:
    """Split a report into groups, which must be whole and in the order of the sample ids."""
    groups: dict[int, list[RolloutSample]] = {}
    for sample in report:
        groups.setdefault(sample.group, []).append(sample)
    for visit, of_group in groups.items():
        assert [sample.sample_id for sample in of_group] == [
            GROUP_SIZE * visit + i for i in range(GROUP_SIZE)
        ]
    return [*groups.values()]


def check_samples(samples: Sequence[RolloutSample], *visits: int) -> None:
    """Check that these groups are there once, with the responses of uninterrupted requests."""
    expected = {answer.sample_id: answer for answer in answers(*visits)}
    assert sorted(sample.sample_id for sample in samples) == sorted(expected)
    for sample in samples:
        answer = expected[sample.sample_id]
        response = whole_response(answer.key, answer.prompt)
        assert (sample.row, sample.group, sample.prompt) == (answer.row, answer.group, answer.prompt)
        assert sample.response == response and sample.log_probs == [-token / 8 for token in response]
        assert sample.truncated == (response[-1] != STOP_TOKEN)
        assert len(sample.versions) == len(response) and sample.versions == sorted(sample.versions)


def test_groups_are_reported_whole_in_the_order_in_which_they_finish(tmp_path):
    job = Stream(tmp_path, max_running=100)
    job.stream.add(answers(*range(8)), **SAMPLING)
    request = job.inference.requests[0].request
    assert (request.temperature, request.top_p, request.top_k) == (0.8, 0.9, 7)
    assert job.inference.num_steps == 0 and job.reports == []  # `add` returns at once
    while job.stream.has_unfinished():
        before = len(job.samples)
        job.stream.step()
        assert len(job.table) == len(job.samples) >= before
    lengths = {
        visit: max(len(whole_response(one.key, one.prompt)) for one in answers(visit)) for visit in range(8)
    }
    assert job.groups == sorted(job.groups, key=lambda visit: lengths[visit])  # all run at once
    assert len({*lengths.values()}) > 2 and job.groups != sorted(job.groups)
    assert all(job.reports)  # no report is empty
    check_samples(job.samples, *range(8))


def test_a_call_that_waits_runs_beside_the_stream(tmp_path):
    job = Stream(tmp_path, max_running=4)
    job.stream.add(answers(0, 1), **SAMPLING)
    job.step(2)
    asked = answers(20, 21)
    told = job.engine.generate([one.prompt for one in asked], [one.key for one in asked], temperature=0.5)
    assert [one.token_ids for one in told] == [whole_response(one.key, one.prompt) for one in asked]
    assert job.reports == []  # the call does not report: the role does when it returns
    job.stream.collect()
    assert len(job.reports) == 1 and {*job.groups} <= {0, 1}  # they were queued before
    job.stream.drain()
    check_samples(job.samples, 0, 1)
    assert not job.inference.has_unfinished() and job.engine.take() == []


def test_each_token_has_the_version_that_sampled_it(tmp_path):
    job = Stream(tmp_path, max_running=100)
    job.stream.add(answers(0, 1, 2), **SAMPLING)
    job.step(3)
    job.inference.commit(1, "recompute")
    job.step(2)
    job.inference.set_version(2)
    job.stream.drain()
    check_samples(job.samples, 0, 1, 2)
    for sample in job.samples:
        assert sample.versions == [0, 0, 0, 1, 1, *[2] * len(sample.response)][: len(sample.response)]
    assert {sample.versions[-1] for sample in job.samples} == {0, 1, 2}


def save_all(jobs: Sequence[Stream], folder: Path, visits: Sequence[int]) -> list[Path]:
    files = [folder / f"engine_{number}" for number in range(len(jobs))]
    for job, file in zip(jobs, files, strict=True):
        told = job.stream.save(file, visits)
        assert told == hashlib.sha256(file.read_bytes()).hexdigest()
    return files


@pytest.mark.parametrize("seed", range(20))
def test_a_checkpoint_goes_on_with_any_number_of_engines(tmp_path, seed):
    rng = random.Random(seed)
    visits = list(range(rng.randint(1, 9)))
    options = {"max_running": rng.randint(1, 6), "has_experts": seed % 2 == 0}
    before = [Stream(tmp_path, **options) for _ in range(rng.randint(1, 3))]
    for visit in visits:
        rng.choice(before).stream.add(answers(visit), **SAMPLING)
    for job in before:
        job.step(rng.randint(0, 30))
    done = [visit for job in before for visit in job.groups]
    trained = rng.sample(done, rng.randint(0, len(done)))  # a step has trained on them: not in the buffer
    left = [visit for visit in visits if visit not in trained]
    files = save_all(before, tmp_path, left)

    after = [Stream(tmp_path, **options) for _ in range(rng.randint(1, 3))]
    engine_of = {visit: rng.choice(after) for visit in left}
    for job in after:
        job.inference.set_version(1)
        own = [visit for visit, engine in engine_of.items() if engine is job]
        job.stream.load(answers(*own), files, **SAMPLING)
        assert {*job.groups} == {*own} & {*done}  # finished groups are reported at once
    for job in (*before, *after):
        job.inference.set_version(1)
        job.stream.drain()
    samples = [sample for job in before for sample in job.samples]
    check_samples(samples, *visits)  # the running job is not disturbed
    resumed = [sample for job in after for sample in job.samples]
    check_samples(resumed, *left)
    uninterrupted = {sample.sample_id: sample for sample in samples}
    for sample in resumed:
        assert sample.versions == uninterrupted[sample.sample_id].versions
        if options["has_experts"]:
            assert torch.equal(sample.experts, experts_of([*sample.prompt, *sample.response]))
    assert {
        sample.sample_id for job in after for sample in (job.table.block(s).rollouts[s] for s in job.table)
    } == {sample.sample_id for sample in resumed}


def test_a_file_of_a_checkpoint_in_which_answers_had_fields_of_episodes_is_read(tmp_path):
    before, after = Stream(tmp_path), Stream(tmp_path)
    before.stream.add(answers(*LONG[:2]), **SAMPLING)
    before.step(8)
    (file,) = save_all([before], tmp_path, LONG[:2])
    saved = decode(file.read_bytes(), list[dict])
    assert {one["finish_reason"] for one in saved} > {None}
    earlier = {"events": [], "holes": [], "episode": None, "further": []}
    file.write_bytes(encode([one | earlier for one in saved]))
    after.stream.load(answers(*LONG[:2]), [file], **SAMPLING)
    prompts = {one.request.id: one.request.prompt for one in after.inference.requests}
    assert prompts == {one.request.id: one.request.prompt for one in before.inference.requests}
    after.stream.drain()
    check_samples(after.samples, *LONG[:2])


def test_a_sample_that_no_file_has_begins_anew(tmp_path):
    before, after = Stream(tmp_path), Stream(tmp_path)
    before.stream.add(answers(LONG[0]), **SAMPLING)
    before.step(2)
    files = save_all([before], tmp_path, LONG[:1])
    after.stream.load(answers(*LONG[:2]), files, **SAMPLING)
    prompts = {one.request.id: len(one.request.prompt) for one in after.inference.requests}
    expected = {f"sample/{one.sample_id}": len(one.prompt) for one in answers(*LONG[:2])}
    longer = {name: prompts[name] - length for name, length in expected.items()}
    assert sorted(longer.values()) == [0, 0, 0, 2, 2, 2]
    after.stream.drain()
    check_samples(after.samples, *LONG[:2])


@pytest.mark.parametrize("reason", ["stop strings", "the engine", None])
def test_a_response_that_cannot_continue_begins_anew_in_both_jobs(tmp_path, reason):
    stop = ["end"] if reason == "stop strings" else []
    cannot_continue = "this engine draws by its own seeds" if reason == "the engine" else None
    jobs = before, after = [Stream(tmp_path, stop, cannot_continue=cannot_continue) for _ in range(2)]
    before.stream.add(answers(LONG[0]), **SAMPLING)
    before.step(3)
    files = save_all([before], tmp_path, LONG[:1])
    after.stream.load(answers(LONG[0]), files, **SAMPLING)
    for job in jobs:
        assert len(job.inference.requests) == GROUP_SIZE
        job.inference.set_version(4)
        job.stream.drain()
        check_samples(job.samples, LONG[0])
        for sample in job.samples:
            kept = 0 if reason else 3
            assert sample.versions == [0] * kept + [4] * (len(sample.response) - kept)


@pytest.mark.parametrize("limit", [1, 3, 4])
@pytest.mark.parametrize("steps", [2, 3, 9, 40])
@pytest.mark.parametrize("cannot_continue", [None, "this engine draws by its own seeds"])
def test_a_smaller_limit_cuts_the_responses_of_a_checkpoint(tmp_path, limit, steps, cannot_continue):
    """They are the responses that an engine with this limit samples."""
    options = {"has_experts": True, "cannot_continue": cannot_continue}
    before, after = Stream(tmp_path, **options), Stream(tmp_path, max_response_length=limit, **options)
    before.stream.add(answers(*LONG[:2]), **SAMPLING)
    before.step(steps)
    after.stream.load(answers(*LONG[:2]), save_all([before], tmp_path, LONG[:2]), **SAMPLING)
    assert all(one.request.max_tokens <= limit for one in after.inference.requests)
    after.stream.drain()
    expected = {one.sample_id: whole_response(one.key, one.prompt) for one in answers(*LONG[:2])}
    assert {sample.sample_id: sample.response for sample in after.samples} == {
        sample_id: response[:limit] for sample_id, response in expected.items()
    }
    for sample in after.samples:
        assert sample.truncated and len(sample.versions) == len(sample.log_probs) == limit
        assert torch.equal(sample.experts, experts_of([*sample.prompt, *sample.response]))


def test_a_larger_limit_lets_unfinished_responses_of_a_checkpoint_go_on(tmp_path):
    before, after = Stream(tmp_path, max_response_length=3), Stream(tmp_path)
    before.stream.add(answers(*LONG[:2]), **SAMPLING)
    before.step(2)  # three of the six responses have two tokens, the others none
    after.stream.load(answers(*LONG[:2]), save_all([before], tmp_path, LONG[:2]), **SAMPLING)
    after.stream.drain()
    check_samples(after.samples, *LONG[:2])


def test_a_checkpoint_computes_the_cache_of_unfinished_requests_anew_and_lets_the_engine_go_on(tmp_path):
    job = Stream(tmp_path)
    job.stream.add(answers(*LONG[:2]), **SAMPLING)
    job.step(1)
    order = [one.request.id for one in job.inference.requests]
    digest = job.stream.save(None, LONG[:2])  # a rank that does not write
    assert job.inference.num_resets == 1 and [*tmp_path.iterdir()] == []
    assert [one.request.id for one in job.inference.requests] == order
    assert digest == job.stream.save(tmp_path / "file", LONG[:2])
    job.step(1)
    assert job.inference.num_steps == 2  # it is not paused any more


@pytest.mark.parametrize("weight_update", ["keep", "recompute", "wait"])
def test_responses_over_an_old_cache_go_on_with_keep_only(tmp_path, weight_update):
    before = Stream(tmp_path, max_running=100, weight_update="keep")
    before.stream.add(answers(*LONG[:2]), **SAMPLING)
    before.step(2)
    before.inference.commit(1, "keep")
    before.step(1)
    before.stream.add(answers(LONG[2]), **SAMPLING)
    before.step(1)
    after = Stream(tmp_path, max_running=100, weight_update=weight_update)
    after.inference.set_version(1)
    after.stream.load(answers(*LONG[:3]), save_all([before], tmp_path, LONG[:3]), **SAMPLING)
    num_left = {
        visit: {len(one.request.prompt) for one in after.inference.requests if one.request.id in ids}
        for visit in LONG[:3]
        for ids in [{f"sample/{answer.sample_id}" for answer in answers(visit)}]
    }
    goes_on = 4 if weight_update == "keep" else 0  # tokens that are part of the new prompt
    for visit, tokens in zip(LONG[:3], (goes_on, goes_on, 1), strict=True):
        assert num_left[visit] == {len(make_answer(visit, 0).prompt) + tokens}
    after.stream.drain()
    check_samples(after.samples, *LONG[:3])
    begun = {sample.versions[0] for sample in after.samples if sample.group != LONG[2]}
    assert begun == {0 if weight_update == "keep" else 1}


def test_finished_responses_without_experts_begin_anew_where_a_job_replays_those_of_the_engine(tmp_path):
    """The run that a checkpoint is of may have had no --moe-routing-replay engine."""
    before = Stream(tmp_path, max_running=100)
    after = Stream(tmp_path, max_running=100, weight_update="wait", has_experts=True)
    before.stream.add(answers(0, 1, 2, 3), **SAMPLING)
    while not before.samples:
        before.step(1)
    files = save_all([before], tmp_path, [0, 1, 2, 3])
    after.inference.set_version(1)
    after.stream.load(answers(0, 1, 2, 3), files, **SAMPLING)
    assert not after.samples
    after.stream.drain()
    check_samples(after.samples, 0, 1, 2, 3)
    for sample in after.samples:
        assert torch.equal(sample.experts, experts_of([*sample.prompt, *sample.response]))


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("is_lost", [False, True], ids=["checkpoint", "lost engine"])
def test_with_wait_a_response_of_other_weights_begins_anew(tmp_path, is_lost, version):
    """The engine tells experts of the current weights for a prefix, so all tokens must come from these."""
    options = {"max_running": 100, "weight_update": "wait", "has_experts": True}
    before, after = Stream(tmp_path, **options), Stream(tmp_path, **options)
    before.stream.add(answers(*LONG[:2]), **SAMPLING)
    before.step(3)
    before.inference.report()
    file = tmp_path / "rollout_engine_0.msgpack"
    if is_lost:
        before.stream.give_up(file)
    else:
        before.stream.save(file, LONG[:2])
    after.inference.set_version(version)
    after.stream.load(answers(*LONG[:2]), [file], **SAMPLING)
    own = {f"sample/{one.sample_id}": len(one.prompt) for one in answers(*LONG[:2])}
    kept = {len(one.request.prompt) - own[one.request.id] for one in after.inference.requests}
    assert kept == {0 if version else 3}
    after.stream.drain()
    check_samples(after.samples, *LONG[:2])
    assert {number for sample in after.samples for number in sample.versions} == {version}


def test_an_aborted_stream_forgets_its_requests_and_takes_new_ones(tmp_path):
    job = Stream(tmp_path)
    job.stream.add(answers(*LONG[:2]), **SAMPLING)
    job.step(2)
    assert job.reports == [] and job.inference.has_unfinished()
    job.stream.abort()
    assert not job.stream.has_unfinished() and not job.inference.has_unfinished()
    job.stream.add(answers(LONG[0], LONG[2]), **SAMPLING)
    job.stream.drain()
    check_samples(job.samples, LONG[0], LONG[2])


@pytest.mark.parametrize("seed", range(20))
def test_the_requests_of_an_engine_that_is_gone_go_on_in_others_with_the_reported_tokens(tmp_path, seed):
    draw = random.Random(seed)
    visits = draw.sample(LONG, 6)
    first, second, third = (Stream(tmp_path, has_experts=seed % 2 == 1) for _ in range(3))
    first.stream.add(answers(*visits), **SAMPLING)
    first.step(draw.randrange(1, 15))
    first.inference.report()
    first.step(draw.randrange(0, 4))
    known = {output.id: len(output.token_ids) for output in first.inference.reported()}
    saved = tmp_path / "rollout_engine_0.msgpack"
    first.stream.give_up(saved)
    assert not first.stream.has_unfinished() and first.inference.requests  # nobody asks the engine again
    left = [visit for visit in visits if visit not in first.groups]
    second.stream.load(answers(*left), [saved], **SAMPLING)
    for one in second.inference.requests:
        answer = make_answer(*divmod(int(one.request.id.split("/")[1]), GROUP_SIZE))
        assert len(one.request.prompt) == len(answer.prompt) + known.get(one.request.id, 0)
    second.step(draw.randrange(0, 6))
    second.inference.report()
    second.stream.give_up(tmp_path / "rollout_engine_1.msgpack")  # this engine is lost, too
    left = [visit for visit in left if visit not in second.groups]
    third.inference.version = 3
    third.stream.load(answers(*left), sorted(tmp_path.glob("rollout_engine_*.msgpack")), **SAMPLING)
    third.step(1000)
    check_samples([*first.samples, *second.samples, *third.samples], *visits)


def test_a_rank_without_its_engine_saves_what_is_finished(tmp_path):
    job = Stream(tmp_path, max_running=100)
    job.stream.add(answers(*LONG[:4]), **SAMPLING)
    while len(job.groups) < 2:
        job.stream.step()
    finished = [*job.groups]
    job.stream.give_up(tmp_path / "moved")
    path = tmp_path / "rollout_engine_0.msgpack"
    digest = job.stream.save(path, LONG[:4], has_engine=False)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    other = Stream(tmp_path)
    other.stream.load(answers(*finished), [path], **SAMPLING)
    assert not other.stream.has_unfinished() and sorted(other.groups) == sorted(finished)


def test_an_aborted_call_leaves_the_other_requests_and_nothing_of_its_own(tmp_path, monkeypatch):
    """A SIGTERM ends canaries of which one has finished, and the checkpoint then saves the other requests."""
    stream = Stream(tmp_path, max_running=8)
    stream.stream.add(answers(LONG[0]), **SAMPLING)
    other = make_answer(LONG[1], 0)
    canaries = [
        Request("canary/short", other.prompt, other.key, max_tokens=1, is_first=True),
        Request("canary/long", other.prompt, other.key, max_tokens=99, is_first=True),
    ]
    steps = iter([stream.inference.step, stream.inference.step])

    def step() -> None:
        take_step = next(steps, None)
        if take_step is None:
            raise Aborted
        take_step()

    monkeypatch.setattr(stream.inference, "step", step)
    with pytest.raises(Aborted):
        stream.engine.complete(canaries)
    monkeypatch.undo()
    stream.stream.save(tmp_path / "saved.msgpack", [LONG[0]])
    assert {one.request.id for one in stream.inference.requests} == {
        f"sample/{answer.sample_id}" for answer in answers(LONG[0])
    }
    while stream.stream.has_unfinished():
        stream.stream.step()
    assert [[sample.sample_id for sample in report] for report in stream.reports] == [
        [answer.sample_id for answer in answers(LONG[0])]
    ]


@pytest.mark.parametrize("limit", [None, 2])
def test_held_out_rows_are_answered_beside_a_training_prompt_with_the_same_ids(tmp_path, limit):
    """The engine keeps its weights, so a limit on the tokens of a version does not hold for them."""
    stream, answered = Stream(tmp_path, max_running=4), []
    stream.stream._limit = limit
    stream.stream.report_held_out = answered.append
    visits = LONG[:2]
    stream.stream.add(answers(*visits), **SAMPLING)
    rows = [replace(answer, key=answer.key + 1) for answer in answers(*visits)]
    stream.stream.add(held_out(rows, greedy=True), **SAMPLING)
    how = {request.request.id: request.request.temperature for request in stream.inference.requests}
    assert sorted(how.values()) == [0.0] * 6 + [0.8] * 6
    while stream.stream.has_unfinished():
        stream.stream.step()
    if limit is not None:
        assert not stream.reports
        stream.stream.go_on(visits)
        while stream.stream.has_unfinished():
            stream.stream.step()
    assert sorted(sample.group for report in stream.reports for sample in report) == sorted(3 * visits)
    found = {sample.sample_id: sample for report in answered for sample in report}
    assert len(answered) == 2 and found.keys() == {answer.sample_id for answer in rows}
    for answer in rows:
        sample = found[answer.sample_id]
        assert (sample.group, sample.row, sample.trained) == (answer.group, answer.row, True)
        assert sample.response == whole_response(answer.key, answer.prompt)
    assert {*stream.table} == {answer.sample_id for answer in answers(*visits)}  # only what is trained on
    stream.stream.add(held_out(rows[:GROUP_SIZE], greedy=False), **SAMPLING)
    stream.stream.save(tmp_path / "saved.msgpack", visits)
    file = (tmp_path / "saved.msgpack").read_bytes()
    assert {one.answer.sample_id for one in decode(file, list[SavedAnswer])} == {*stream.table}


def test_held_out_rows_have_the_sampling_of_evaluations_and_training_prompts_keep_theirs(tmp_path):
    """Lengths, temperature and top_p of both, also of training samples that go on after the held-out rows came."""
    job = small_engine.config(tmp_path, 3, eval_max_response_length=5, eval_temperature=0.1, eval_top_p=0.5)
    assert job.sampling.of("train") == job.sampling and job.sampling.max_engine_length == 8 + 5
    of_eval = job.sampling.of("eval").arguments
    assert of_eval == {"temperature": 0.1, "top_p": 0.5, "top_k": 0}
    stream, answered = small_engine.Stream(replace(job, streaming=StreamingConfig(staleness=1))), []
    stream.stream._limit, stream.stream.report_held_out = 2, answered.append
    visits = LONG[:2]
    stream.stream.add(answers(*visits), **SAMPLING)
    rows = [replace(answer, purpose="eval") for answer in answers(*visits)]
    stream.stream.add(held_out(rows, greedy=False), **of_eval)
    seen = {}

    def drain():
        while stream.stream.has_unfinished():
            for one in stream.inference.requests:
                how = one.request.temperature, one.request.top_p
                seen.setdefault(how, set()).add(one.request.id)
            stream.stream.step()

    drain()
    stream.stream.go_on(visits)
    drain()
    assert {how: len(ids) for how, ids in seen.items()} == {(0.8, 0.9): 6, (0.1, 0.5): 6}
    assert {len(sample.response) for sample in stream.samples} == {3}
    assert {len(sample.response) for report in answered for sample in report} == {5}

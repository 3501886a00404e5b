"""Asynchronous runs and their replays: the same metrics bit for bit, also where a replay is killed and resumed.

pytest tests/e2e/test_replay.py                 vLLM inside two ranks, two jobs
pytest tests/e2e/test_replay.py -m nightly      transformers, an engine over two ranks out of process, a fault"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from megarl.rollout.replay_log import Commit, EngineRecord, Start, path_of, read_log, text_of
from tests.e2e.jobs import Job, replace_flags, train
from tests.e2e.test_resume import rows

STALE = ("--staleness", "1", "--train-iters", "4", "--save-interval", "2", "--eval-interval", "2")
APART = (
    *("--nproc-per-node", "3", "--actor-ranks", "0", "--rollout-ranks", "1-2"),
    *("--rollout-tensor-parallel-size", "2", "--staleness", "2", "--weight-update", "keep"),
    *("--train-iters", "6", "--keep", "3"),
)


def run(data: Path, folder: Path, *flags: str) -> Job:
    held_out = ("--eval-data", str(data / "train.jsonl"), "--eval-num-prompts", "4")
    job = train(data, folder, *replace_flags([*STALE, *held_out], list(flags)))
    assert job.returncode == 0, job.output
    return job


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="vllm"),
        pytest.param(("--rollout-backend", "transformers"), id="transformers", marks=pytest.mark.nightly),
        pytest.param(("--weight-update", "wait"), id="wait", marks=pytest.mark.nightly),
        pytest.param(APART, id="apart", marks=pytest.mark.nightly),
    ],
)
def test_a_replay_has_the_metrics_of_the_run(sums_data, tmp_path, flags):
    first = run(sums_data, tmp_path / "first", *flags)
    again = run(sums_data, tmp_path / "again", *flags, "--replay", str(first.folder))
    assert rows(again) == rows(first)
    for path in (first.folder / "engines").glob("rollout_*.jsonl"):
        assert read_log(again.folder, path.stem) == read_log(first.folder, path.stem)


@pytest.mark.nightly
@pytest.mark.timeout(900)  # three jobs of three ranks
def test_a_replay_that_lost_its_last_steps_resumes_as_the_uninterrupted_run(sums_data, tmp_path):
    """The run folder of a replay as SIGKILL leaves it in step 4: with one checkpoint and later records."""
    first = run(sums_data, tmp_path / "first", *APART)
    replay = ("--replay", str(first.folder))
    killed = run(sums_data, tmp_path / "again", *APART, *replay)
    for step in (4, 6):
        shutil.rmtree(killed.folder / "checkpoints" / f"step_{step:06d}")
    resumed = run(sums_data, tmp_path / "again", *APART, *replay, "--load", str(killed.folder))
    assert "continues after step 2" in resumed.output
    assert rows(resumed) == rows(first)


@pytest.mark.nightly
def test_a_commit_one_engine_step_late_is_noticed(sums_data, tmp_path):
    first = run(sums_data, tmp_path / "first")
    name, is_late = "rollout_0", False
    lines = []
    for record in read_log(first.folder, name):
        is_late |= isinstance(record, Commit)
        if is_late and isinstance(record, EngineRecord):
            record = msgspec.structs.replace(record, engine_step=record.engine_step + 1)
        assert isinstance(record, (Start, EngineRecord))
        lines.append(text_of(record) + "\n")
    path_of(first.folder, name).write_text("".join(lines))
    flags = ("--eval-data", str(sums_data / "train.jsonl"), "--eval-num-prompts", "4")
    again = train(sums_data, tmp_path / "again", *STALE, *flags, "--replay", str(first.folder))
    assert (
        again.returncode != 0
        and "this job differs from that run" in again.output
        or rows(again) != rows(first)
    )

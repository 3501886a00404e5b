"""The log of an asynchronous run: written, damaged, cut after a resume, and read back as a plan.

pytest tests/trainer/test_replay.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.loggers.json_lines import ENGINES, cut_after
from megarl.trainer.replay import (
    Admit,
    Canary,
    Checkpoint,
    Commit,
    EngineJoined,
    EngineLost,
    Evaluate,
    ReplayError,
    ReplayLog,
    ReplayPlan,
    RewardFailed,
    Start,
    Take,
    read_log,
)

SETTINGS = {"--seed": 0, "--staleness": 1, "rows of --train-data": 7, "meshes": {"actor": {"dp": 2}}}
RECORDS = [
    Admit(step=1, engine=0, engine_step=0, version=0, visits=(0, 1)),
    Admit(step=1, engine=1, engine_step=0, version=0, visits=(2, 3)),
    Take(step=1, visits=(1,)),
    RewardFailed(step=1, role="reward", sample_id=13, reason="late"),
    Commit(step=1, engine=0, engine_step=57, version=1),
    Canary(step=1, engine=0, engine_step=57, version=1, visits=(4, 5)),
    Evaluate(step=1, engine=0, engine_step=60, version=1, visits=(0,), greedy=True),
    EngineLost(step=2, engine=1, engine_step=9, visits=(3,)),
    EngineJoined(step=2, engine=2, engine_step=0, version=1),
    Take(step=2, visits=(0,)),
    Take(step=2, visits=(9,), suffix="_2"),
    Checkpoint(step=2, engine=0, engine_step=99),
]


def write_log(folder: Path, *records, step: int = 0, settings=SETTINGS) -> Path:
    log = ReplayLog(folder, step, settings)
    log.write(*records)
    log.close()
    return folder / ENGINES


def test_every_kind_of_record_is_read_as_it_was_written(tmp_path):
    path = write_log(tmp_path, *RECORDS)
    assert read_log(tmp_path) == [Start(step=0, format=1, settings=SETTINGS), *RECORDS]
    assert path.read_text().splitlines()[1] == (
        '{"kind":"admit","engine":0,"engine_step":0,"version":0,"visits":[0,1],"step":1}'
    )


def test_a_record_is_in_the_file_when_the_call_returns(tmp_path):
    log = ReplayLog(tmp_path, 0, SETTINGS)
    for number, record in enumerate(RECORDS, 2):
        log.write(record)
        assert len(read_log(tmp_path)) == number
    log.close()


def test_a_last_line_that_a_killed_job_did_not_finish_is_left_out(tmp_path):
    path = write_log(tmp_path, *RECORDS)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for num_bytes in range(1, last):
        path.write_bytes(whole[:-num_bytes])
        assert read_log(tmp_path)[1:] == RECORDS[:-1]


@pytest.mark.parametrize(
    "line, error",
    [
        (b"nonsense", "line 3 is not a record of format 1: JSON is malformed"),
        (b"\xff\xfe", "line 3 is not a record of format 1"),
        (b"[" * 100_000, "line 3 is not a record of format 1"),
        (b'{"kind":"dance","step":1}', "line 3 is not a record of format 1: Invalid value 'dance'"),
        (b'{"kind":"take","step":1}', "line 3 is not a record of format 1: Object missing required field `visits`"),
        (b'{"kind":"take","step":"1","visits":[]}', "Expected `int`, got `str`"),
        (b'{"kind":"start","step":1,"format":2,"settings":{}}', "line 3: the log has format 2, and this version"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, line, error):
    path = write_log(tmp_path, RECORDS[0])
    path.write_bytes(path.read_bytes() + line + b"\n")
    write_log(tmp_path, RECORDS[1])
    with pytest.raises(ReplayError) as raised:
        read_log(tmp_path)
    assert str(path) in str(raised.value) and error in str(raised.value)


def test_a_file_that_is_no_log_is_refused(tmp_path):
    with pytest.raises(ReplayError, match=r"engines\.jsonl cannot be read \(No such file or directory\)"):
        read_log(tmp_path)
    (tmp_path / ENGINES).write_text("")
    with pytest.raises(ReplayError, match=r"engines\.jsonl has no records"):
        read_log(tmp_path)
    (tmp_path / ENGINES).write_text('{"kind":"take","step":1,"visits":[]}\n')
    with pytest.raises(ReplayError, match=r"line 1: the first record must be of kind start"):
        read_log(tmp_path)


def test_a_plan_has_the_records_of_each_engine_and_the_visits_of_each_step(tmp_path):
    write_log(tmp_path, *RECORDS)
    plan = ReplayPlan.read(tmp_path, SETTINGS)
    assert {engine: [step for step, _ in records] for engine, records in plan.engines.items()} == {
        0: [0, 57, 57, 60, 99],
        1: [0, 9],
        2: [0],
    }
    assert plan.engines[0][0] == (0, RECORDS[0])
    assert plan.taken == {1: (1,), 2: (0,)} and plan.failed_rewards == {1: [RECORDS[3]]}
    assert ReplayPlan.read(tmp_path, SETTINGS, suffix="_2").taken == {2: (9,)}


def test_a_resumed_run_continues_the_log_of_its_checkpoint(tmp_path):
    later = [
        Admit(step=3, engine=0, engine_step=99, version=2, visits=(6,)),
        Take(step=3, visits=(6,)),
    ]
    path = write_log(tmp_path, *RECORDS, *later)
    path.write_bytes(path.read_bytes() + b'{"kind":"take","st')  # the job was killed here
    cut_after(tmp_path, 2)
    again = Admit(step=3, engine=0, engine_step=5, version=2, visits=(7,))
    write_log(tmp_path, again, Take(step=3, visits=(7,)), step=2)
    plan = ReplayPlan.read(tmp_path, SETTINGS)
    assert plan.taken == {1: (1,), 2: (0,), 3: (7,)}
    assert plan.engines[0][-2:] == [(99, RECORDS[-1]), (99 + 5, again)]  # as if the job had never stopped
    cut_after(tmp_path, 0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "changed, error",
    [
        ({"--seed": 1}, "--seed is 0 in that run and 1 in this job; a replay needs the same"),
        ({"--staleness": 2}, "--staleness is 1 in that run and 2 in this job"),
        ({"rows of --train-data": 8}, "rows of --train-data is 7 in that run and 8 in this job"),
        ({"meshes": {"actor": {"dp": 4}}}, r"meshes\.actor\.dp is 2 in that run and 4 in this job"),
        ({"meshes": {"actor": {"dp": 2}, "critic": {"dp": 1}}}, r"meshes\.critic is not set in that run"),
        ({"--weight-update": "keep"}, "--weight-update is not set in that run and keep in this job"),
    ],
)
def test_a_replay_with_other_settings_is_refused(tmp_path, changed, error):
    write_log(tmp_path, *RECORDS)
    with pytest.raises(ReplayError, match=error):
        ReplayPlan.read(tmp_path, SETTINGS | changed)


def test_a_run_that_changed_its_settings_at_a_resume_cannot_be_replayed(tmp_path):
    write_log(tmp_path, *RECORDS)
    write_log(tmp_path, step=2, settings=SETTINGS | {"--staleness": 2})
    with pytest.raises(ReplayError, match="--staleness is 2 in that run and 1 in this job"):
        ReplayPlan.read(tmp_path, SETTINGS)

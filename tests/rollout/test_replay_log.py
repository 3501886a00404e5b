"""The log of an asynchronous run: written, damaged, cut after a resume, and read back as a plan.

pytest tests/rollout/test_replay_log.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.loggers.json_lines import cut_after
from megarl.rollout.replay_log import (
    DRIVER,
    Admit,
    Canary,
    Checkpoint,
    Commit,
    DriverPlan,
    EngineJoined,
    EngineLeft,
    Evaluate,
    ReplayError,
    ReplayLog,
    RewardFailed,
    Route,
    Save,
    Start,
    Take,
    path_of,
    planned_records,
    read_log,
)

SETTINGS = {"--seed": "0", "--staleness": "1", "bytes of rows.jsonl": "700"}
ENGINE = "rollout_0"
RECORDS = [
    Admit(step=1, engine_step=0, version=0, visits=(0, 1)),
    Commit(step=1, engine_step=57, version=1),
    Canary(step=1, engine_step=57, version=1, visits=(4, 5)),
    Evaluate(step=1, engine_step=60, version=1, visits=(0,), greedy=True),
    Checkpoint(step=2, engine_step=99),
]
OF_DRIVER = [
    Route(step=1, visits=(0, 1), engines=(1, 0)),
    Take(step=1, visits=(1,)),
    RewardFailed(step=1, role="reward", samples=(13, 14)),
    Take(step=2, visits=(0,)),
    Take(step=2, visits=(9,), suffix="_2"),
    Save(step=2),
]


def write_log(folder: Path, *records, name: str = ENGINE, step: int = 0, settings=None) -> Path:
    log = ReplayLog(folder, name, step, settings)
    log.write(*records)
    log.close()
    return path_of(folder, name)


def test_every_kind_of_record_is_read_as_it_was_written(tmp_path):
    path = write_log(tmp_path, *RECORDS, *OF_DRIVER, settings=SETTINGS)
    records = [Start(step=0, format=1, settings=SETTINGS), *RECORDS, *OF_DRIVER]
    assert read_log(tmp_path, ENGINE) == records
    assert path == tmp_path / "engines" / "rollout_0.jsonl"
    assert path.read_text().splitlines()[1] == (
        '{"kind":"admit","step":1,"engine_step":0,"version":0,"visits":[0,1]}'
    )


def test_a_record_is_in_the_file_when_the_call_returns(tmp_path):
    log = ReplayLog(tmp_path, ENGINE, 0)
    for number, record in enumerate(RECORDS, 2):
        log.write(record)
        assert len(read_log(tmp_path, ENGINE)) == number
    log.close()


def test_a_last_line_that_a_killed_job_did_not_finish_is_left_out(tmp_path):
    path = write_log(tmp_path, *RECORDS)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for num_bytes in range(1, last):
        path.write_bytes(whole[:-num_bytes])
        assert read_log(tmp_path, ENGINE)[1:] == RECORDS[:-1]


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
        read_log(tmp_path, ENGINE)
    assert str(path) in str(raised.value) and error in str(raised.value)


def test_a_file_that_is_no_log_is_refused(tmp_path):
    with pytest.raises(ReplayError, match=r"driver\.jsonl cannot be read \(No such file or directory\)"):
        read_log(tmp_path, DRIVER)
    path = path_of(tmp_path, DRIVER)
    path.parent.mkdir()
    path.write_text("")
    with pytest.raises(ReplayError, match=r"driver\.jsonl has no records"):
        read_log(tmp_path, DRIVER)
    path.write_text('{"kind":"take","step":1,"visits":[]}\n')
    with pytest.raises(ReplayError, match=r"line 1: the first record must be of kind start"):
        read_log(tmp_path, DRIVER)


def test_the_drivers_plan_has_engines_and_groups_of_each_step(tmp_path):
    write_log(tmp_path, *OF_DRIVER, name=DRIVER, settings=SETTINGS)
    plan = DriverPlan.read(tmp_path, SETTINGS)
    assert plan.engines == {("", 0): 1, ("", 1): 0}
    assert plan.taken == {("", 1): (1,), ("", 2): (0,), ("_2", 2): (9,)}
    assert plan.failed == {("reward", 1): (13, 14)}
    assert plan.saved == {2} and plan.last_step == 2


def test_a_resumed_run_is_planned_as_one_that_never_stopped(tmp_path):
    later = Admit(step=3, engine_step=99, version=2, visits=(6,))
    repeated = Evaluate(
        step=2, engine_step=99, version=2, visits=(0,)
    )  # SIGTERM ended it, and it is repeated
    path = write_log(tmp_path, *RECORDS, repeated, later)
    path.write_bytes(path.read_bytes() + b'{"kind":"admit","st')  # the job was killed here
    cut_after(tmp_path, 2)
    again = Admit(step=3, engine_step=5, version=2, visits=(7,))
    write_log(tmp_path, again, step=2)
    moved = Admit(step=3, engine_step=99 + 5, version=2, visits=(7,))
    assert planned_records(tmp_path, ENGINE, completed=0) == [*RECORDS, moved]
    assert planned_records(tmp_path, ENGINE, completed=2) == [again]
    with pytest.raises(ReplayError, match="goes on after step 1, and .* has no checkpoint of that step"):
        planned_records(tmp_path, ENGINE, completed=1)
    cut_after(tmp_path, -1)
    assert path.read_bytes() == b""


def test_a_run_that_began_from_a_checkpoint_of_another_is_planned_from_there(tmp_path):
    record = Admit(step=3, engine_step=5, version=2, visits=(7,))
    write_log(tmp_path, record, step=2)
    assert planned_records(tmp_path, ENGINE, completed=2) == [record]
    with pytest.raises(ReplayError, match=r"Replay from the step where that run began \(2\)"):
        planned_records(tmp_path, ENGINE, completed=0)


@pytest.mark.parametrize(
    "changed, error",
    [
        ({"--seed": "1"}, "--seed is 0 in that run and 1 in this job. A replay needs the same"),
        ({"bytes of rows.jsonl": "8"}, "bytes of rows.jsonl is 700 in that run and 8 in this job"),
        ({"--weight-update": "keep"}, "--weight-update is not set in that run and keep in this job"),
    ],
)
def test_a_replay_with_other_settings_is_refused(tmp_path, changed, error):
    write_log(tmp_path, *OF_DRIVER, name=DRIVER, settings=SETTINGS)
    with pytest.raises(ReplayError, match=error):
        DriverPlan.read(tmp_path, SETTINGS | changed)


def test_a_run_that_did_not_log_the_sizes_of_all_files_can_be_replayed(tmp_path):
    """Older versions logged those of --train-data and --eval-data of the first actor."""
    write_log(tmp_path, *OF_DRIVER, name=DRIVER, settings=SETTINGS)
    now = SETTINGS | {"bytes of answers.jsonl": "90"}
    assert DriverPlan.read(tmp_path, now) == DriverPlan.read(tmp_path, SETTINGS)
    write_log(tmp_path, *OF_DRIVER, name=DRIVER, settings=now)
    with pytest.raises(ReplayError, match="bytes of answers.jsonl is 90 in that run and 91 in this job"):
        DriverPlan.read(tmp_path, SETTINGS | {"bytes of answers.jsonl": "91"})


def test_a_run_that_logged_a_flag_that_may_differ_can_be_replayed(tmp_path):
    """Older versions logged --nnodes."""
    write_log(tmp_path, *OF_DRIVER, name=DRIVER, settings=SETTINGS | {"--nnodes": "2"})
    assert DriverPlan.read(tmp_path, SETTINGS).last_step == 2


def test_a_run_that_changed_its_settings_at_a_resume_cannot_be_replayed(tmp_path):
    write_log(tmp_path, *OF_DRIVER, name=DRIVER, settings=SETTINGS)
    write_log(tmp_path, name=DRIVER, step=2, settings=SETTINGS | {"--staleness": "2"})
    with pytest.raises(ReplayError, match="--staleness is 2 in that run and 1 in this job"):
        DriverPlan.read(tmp_path, SETTINGS)


def test_a_run_that_has_lost_an_engine_cannot_be_replayed(tmp_path):
    changes = [
        EngineLeft(step=2, role="rollout", engine=1, reason="it died"),
        EngineJoined(step=4, role="rollout", engine=1),
    ]
    write_log(tmp_path, *OF_DRIVER, *changes, name=DRIVER, settings=SETTINGS)
    assert read_log(tmp_path, DRIVER)[-2:] == changes
    with pytest.raises(ReplayError, match=r"engine 1 of rollout left it in step 2 \(it died\)"):
        DriverPlan.read(tmp_path, SETTINGS)

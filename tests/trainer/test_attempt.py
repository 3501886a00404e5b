"""An attempt that was given up cannot write into the run folder beside its successor."""

import json
import os
from pathlib import Path

import pytest

from megarl.trainer.attempt import ATTEMPTS, Attempt, SupersededError
from tests.trainer.test_run_folder import open_run


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a run folder but for TensorBoard's, which a thread writes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "tensorboard"]
    return {str(path): path.read_bytes() for path in files}


def test_every_attempt_has_the_next_number_and_tells_where_it_runs(tmp_path):
    attempts = [Attempt(tmp_path, after_step) for after_step in (0, 4, 4)]
    assert [attempt.number for attempt in attempts] == [1, 2, 3]
    assert [attempt.is_current() for attempt in attempts] == [False, False, True]
    body = json.loads((tmp_path / ATTEMPTS).read_text())["attempts"]
    assert [(known["number"], known["after_step"], known["pid"]) for known in body] == [
        (1, 0, os.getpid()),
        (2, 4, os.getpid()),
        (3, 4, os.getpid()),
    ]
    assert [path.name for path in tmp_path.iterdir()] == [ATTEMPTS]


def test_a_damaged_or_missing_file_stops_nobody(tmp_path):
    attempt = Attempt(tmp_path, 0)
    for text in ("", "[]", '{"attempts": [{"number": "2"}]}'):
        (tmp_path / ATTEMPTS).write_text(text)
        attempt.check("anything")
    (tmp_path / ATTEMPTS).unlink()
    attempt.check("anything")


def test_an_older_attempt_is_refused_by_name_and_changes_nothing(tmp_path):
    folder = tmp_path / "run"
    old = open_run(folder)
    old.begin_step()
    old.record_step(1, {"reward/mean": 0.5}, num_tokens=10)
    old.begin_step()
    assert not old.is_superseded
    Attempt(folder, 1)  # on another node, whose file system has given the old lock up
    before = contents(folder)
    told = r"attempt 1 must not write {}, because attempt 2 on node .* has continued the run since 20"
    with pytest.raises(SupersededError, match=told.format("the samples of step 2")):
        old.write_rollouts(2, [{"sample_id": 1, "reward": 1.0}])
    with pytest.raises(SupersededError, match=told.format("the evaluation of step 1")):
        old.record_evaluation(1, {"eval/reward": 0.5})
    old.record_step(2, {"reward/mean": 0.5}, num_tokens=10)
    with pytest.raises(SupersededError, match=told.format("the metrics of step 2")):
        old.begin_step()
    assert old.is_superseded
    old.close()
    assert contents(folder) == before

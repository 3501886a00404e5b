"""What is logged with a tracker can be read back by the tracker's own reader, also after a resume.

pytest tests/loggers/test_trackers.py"""

from __future__ import annotations

import json
import math
import pkgutil
import shutil
import struct
import threading
import time
import typing
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl import loggers
from megarl.loggers import LOGGERS, LoggerContext, Tracker
from megarl.config.schema import BatchConfig, DataConfig, ModelConfig, RunConfig, TrainConfig
from megarl.loggers.base import flags_of
from megarl.trainer.run_folder import Run
from tests.launch import succeed
from tests.tensorboard_files import number_files_alike

ARGUMENTS = "# resolved\n--lr 1e-4\n--no-shuffle\n--bf16\n--train-data 'a b.jsonl' c.jsonl\n"
SAMPLE = {
    "sample_id": 3,
    "prompt": [{"role": "user", "content": "2+2 ?"}],
    "response": "#### 4",
    "reward": 1.0,
    "response_ids": [5, 6],
}


def context(folder: Path, first_step: int | None = None) -> LoggerContext:
    return LoggerContext(folder=folder, project="sums", name="first", first_step=first_step)


def log_steps(name: str, folder: Path, steps: dict[int, float], first_step: int | None = None) -> None:
    logger = pkgutil.resolve_name(LOGGERS[name])(context(folder, first_step))
    logger.log_config(ARGUMENTS)
    for step, reward in steps.items():
        logger.log_metrics(
            step, {"reward/mean": reward, "policy/loss": math.nan if step == 1 else 0.5}, 1e9 + step
        )
        logger.log_rollouts(step, [SAMPLE], "train")
    logger.log_rollouts(max(steps), [{"name": "eval/reward", **SAMPLE}], "eval")
    logger.close()


def records_of(data: bytes) -> Iterator[Any]:
    """Read an offline run of Weights & Biases: LevelDB's log format after a header of 7 bytes, protobuf
    records."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, parts, block = 7, b"", 32768
    while at + 7 <= len(data):
        if block - at % block < 7:  # no room for a record's head: the rest of the block is padding
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_every_tracker_of_the_flag_can_be_opened() -> None:
    from megarl.config.schema import RunConfig

    choices, _ = typing.get_args(typing.get_type_hints(RunConfig)["log_with"])
    assert typing.get_args(choices) == tuple(LOGGERS)


def test_flags_of_resolved_arguments() -> None:
    assert flags_of(ARGUMENTS) == {
        "lr": "1e-4",
        "shuffle": "false",
        "bf16": "true",
        "train-data": "'a b.jsonl' c.jsonl",
    }


def test_tensorboard_shows_scalars_texts_and_flags_and_forgets_steps_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    number_files_alike(monkeypatch)
    log_steps("tensorboard", tmp_path, {1: 0.25, 2: 0.5})
    log_steps("tensorboard", tmp_path, {2: 0.75}, first_step=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value, e.wall_time) for e in events.Scalars("reward/mean")] == [
        (1, 0.25, 1e9 + 1),
        (2, 0.75, 1e9 + 2),
    ]
    assert math.isnan(events.Scalars("policy/loss")[0].value)
    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]
    }
    assert (
        "response: #### 4" in texts["rollouts/0/text_summary"]
        and "response_ids" not in texts["rollouts/0/text_summary"]
    )
    assert "rollouts/eval/reward/text_summary" in texts and "--lr 1e-4" in texts["arguments/text_summary"]
    from tensorboard.plugins.hparams import metadata

    start = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert metadata.parse_session_start_info_plugin_data(start).hparams["lr"].string_value == "1e-4"


def test_wandb_offline_holds_metrics_and_flags_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra `trackers` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_steps("wandb", tmp_path, {1: 0.25, 2: 0.5})
    time.sleep(1.1)  # an offline run's folder is named after the second in which it starts
    log_steps("wandb", tmp_path, {3: 0.75}, first_step=3)
    wandb.teardown()  # as at the process's exit: until then its service may still be writing
    rows, ids, flags = [], set(), {}
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        for record in records_of(file.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                rows.append(
                    {
                        item.key or ".".join(item.nested_key): json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
            elif kind == "run":
                ids.add(record.run.run_id)
                assert (record.run.project, record.run.display_name) == ("sums", "first")
            elif kind == "config":
                flags |= {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.config.update
                }
    assert [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    assert any("rollouts/train" in "".join(row) for row in rows)
    assert ids == {(tmp_path / "wandb_run_id").read_text()}
    assert flags["lr"] == "1e-4"


def test_mlflow_store_holds_metrics_flags_and_samples_of_one_run(tmp_path: Path) -> None:
    if find_spec("mlflow") is None:
        pytest.skip("the extra `trackers` is not installed")
    store = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri()}
    # In a process of its own: mlflow imports importlib_metadata, which takes the place of importlib.metadata.
    succeed(Path(__file__).with_name("run_mlflow.py"), tmp_path, environment=store, timeout=120)


class Flaky:
    """A tracker that fails when told to."""

    failing: frozenset[str] = frozenset()
    hangs_at = ""
    may_go_on = threading.Event()
    seen: list[tuple[str, Any]] = []

    def __init__(self, context: LoggerContext) -> None:
        self._call("open", context.first_step)

    def _call(self, name: str, what: Any) -> None:
        if name == self.hangs_at:
            self.may_go_on.wait(60)
        if name in self.failing:
            raise ConnectionError(f"no {name}")
        self.seen.append((name, what))

    def log_config(self, arguments: str) -> None:
        self._call("config", arguments)

    def log_metrics(self, step: int, metrics: Any, wall_time: float) -> None:
        self._call("metrics", step)

    def log_rollouts(self, step: int, samples: Any, purpose: str) -> None:
        self._call("rollouts", step)

    def close(self) -> None:
        self._call("close", None)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Flaky]]:
    monkeypatch.setitem(LOGGERS, "wandb", f"{__name__}:Flaky")
    monkeypatch.setattr(Flaky, "failing", frozenset())
    monkeypatch.setattr(Flaky, "hangs_at", "")
    monkeypatch.setattr(Flaky, "may_go_on", threading.Event())
    monkeypatch.setattr(Flaky, "seen", [])
    yield Flaky
    Flaky.may_go_on.set()


def waits_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_tracker(folder: Path, first_step: int | None = None) -> tuple[Tracker, list[str]]:
    notes: list[str] = []
    tracker = Tracker("wandb", context(folder, first_step), notes.append)
    tracker.write("log_config", ARGUMENTS)
    return tracker, notes


def test_a_tracker_that_cannot_be_opened_is_refused_in_a_new_run_and_told_in_a_resumed_one(
    tmp_path: Path, flaky: type[Flaky]
) -> None:
    flaky.failing = frozenset({"open"})
    tracker, notes = open_tracker(tmp_path)
    with pytest.raises(ValueError, match=r"--log-with \(wandb\): .*no open\n.*WANDB_MODE=offline"):
        tracker.check()
    tracker.close(has_failed=True)
    assert notes == []
    tracker, notes = open_tracker(tmp_path, first_step=3)
    tracker.write("log_metrics", 3, {}, 0.0)
    waits_until(lambda: notes)
    flaky.failing = frozenset()
    tracker.write("log_metrics", 4, {}, 0.0)  # the first was kept
    tracker.close(has_failed=False)
    assert [what for what in flaky.seen if what[0] == "metrics"] == [("metrics", 3), ("metrics", 4)]
    assert flaky.seen[-1] == ("close", None)
    assert len(notes) == 1 and "no open" in notes[0] and notes[0].startswith("--log-with (wandb) fails")


@pytest.mark.parametrize("failing", ["metrics", "rollouts"])
def test_an_outage_is_told_once_and_loses_no_metrics(
    tmp_path: Path, flaky: type[Flaky], failing: str
) -> None:
    tracker, notes = open_tracker(tmp_path)
    tracker.check()
    for step in (1, 2, 3):
        flaky.failing = frozenset({failing}) if step == 2 else frozenset()
        tracker.write("log_metrics", step, {}, 0.0)
        if step == 2:
            tracker.write("log_rollouts", step, [], "train")
            waits_until(lambda: notes)
            waits_until(lambda: failing == "metrics" or not tracker._records)
        else:
            tracker.write("log_rollouts", step, [], "train")
            waits_until(lambda step=step: ("rollouts", step) in flaky.seen)
    flaky.failing = frozenset({failing, "close"})
    tracker.close(has_failed=False)
    seen = [f"{name[0]}{step}" for name, step in flaky.seen if name in ("metrics", "rollouts")]
    assert [one for one in seen if one[0] == "m"] == ["m1", "m2", "m3"] and {"r1", "r3"} <= {*seen}
    assert ("r2" in seen) == (failing == "metrics")
    assert len(notes) == 1 and f"no {failing}" in notes[0]


def test_a_tracker_that_hangs_delays_neither_records_nor_the_end(
    tmp_path: Path, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "_OPEN_S", 0.1)
    monkeypatch.setattr(loggers, "_CLOSE_S", 0.1)
    flaky.hangs_at = "open"
    with pytest.raises(ValueError, match=r"--log-with \(wandb\): .*no answer within 0\.1 s"):
        open_tracker(tmp_path)[0].check()
    flaky.hangs_at = "metrics"
    monkeypatch.setattr(loggers, "_OPEN_S", 60.0)
    tracker, notes = open_tracker(tmp_path)
    tracker.check()
    for step in range(2000):
        tracker.write("log_metrics", step, {}, 0.0)
    tracker.close(has_failed=False)
    assert len(tracker._records) <= 1000 and len(notes) == 1 and "hangs" in notes[0]


def test_a_run_is_refused_and_leaves_nothing_if_a_tracker_cannot_be_opened(
    tmp_path: Path, flaky: type[Flaky]
) -> None:
    run = RunConfig(save=str(tmp_path / "run"), log_with=("tensorboard", "wandb"))
    config = TrainConfig(
        algorithm=None,
        model=ModelConfig(model="none"),
        batch=BatchConfig(train_iters=3),
        data=DataConfig(train_data=("none",)),
        run=run,
    )
    flaky.failing = frozenset({"open"})
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    (tmp_path / "run" / "tensorboard" / "of_others").touch()
    with pytest.raises(ValueError, match="--log-with"):
        Run(config, "")
    assert [path.name for path in tmp_path.rglob("of_others")] == ["of_others"]
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ValueError, match="--log-with"):
        Run(config, "")
    assert [*tmp_path.iterdir()] == []
    flaky.failing = frozenset()
    with Run(config, "") as again:
        again.record_evaluation(0, {"eval/reward": 0.25})
    assert ("metrics", 0) in flaky.seen

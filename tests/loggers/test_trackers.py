"""What is logged with a tracker can be read back by the tracker's own reader, also after a resume.

pytest tests/loggers/test_trackers.py"""

from __future__ import annotations

import json
import math
import struct
import time
import typing
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.loggers import LOGGERS, LoggerContext, open_loggers
from megarl.loggers.base import flags_of
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
    [logger] = open_loggers([name], context(folder, first_step))
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

"""Logs with MLflow into a local store and reads it back with MLflow's client: run_mlflow.py FOLDER.

A process of its own, started by test_trackers.py: mlflow imports importlib_metadata, which takes the place of
importlib.metadata."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.loggers.test_trackers import log_steps


def check_mlflow(folder: Path) -> None:
    from mlflow import MlflowClient

    log_steps("mlflow", folder, {1: 0.25, 2: 0.5})
    log_steps("mlflow", folder, {3: 0.75}, first_step=3)
    client = MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    expected = [(step, value, 1000 * (10**9 + step)) for step, value in ((1, 0.25), (2, 0.5), (3, 0.75))]
    assert [(m.step, m.value, m.timestamp) for m in history] == expected
    assert run.data.params["lr"] == "1e-4"
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    names = {file.path for file in client.list_artifacts(run.info.run_id, "rollouts")}
    trained = {f"rollouts/step_00000{step}.jsonl" for step in (1, 2, 3)}
    assert names == trained | {f"rollouts/eval_00000{step}_eval_reward.jsonl" for step in (2, 3)}


if __name__ == "__main__":
    check_mlflow(Path(sys.argv[1]))

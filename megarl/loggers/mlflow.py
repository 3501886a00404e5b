"""MLflow, on the server or in the store that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import json

from megarl.loggers.base import LoggerContext, Metrics, Purpose, Samples, flags_of

RUN_ID = "mlflow_run_id"
"""File in the run folder with the id of the run, with which a resumed job continues that run."""
_MAX_PARAMETERS, _MAX_METRICS = 100, 1000  # of one request, by MLflow's REST API


class MLflow:
    """Logs metrics by step, flags as parameters, and samples as artifacts.

    MLflow keeps every value: the steps that a resumed run makes again have two, and its pages show the
    last."""

    def __init__(self, context: LoggerContext) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        file = context.folder / RUN_ID
        if file.exists() and context.first_step is not None:
            self._run = file.read_text()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(context.project)
        experiment = found.experiment_id if found else self._client.create_experiment(context.project)
        self._run = self._client.create_run(experiment, run_name=context.name).info.run_id
        file.write_text(self._run)

    def log_config(self, arguments: str) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self._run).data.params
        # A parameter cannot change: a resumed run adds those that are new. resolved.args has all as they are
        # now.
        new = [Param(name, value) for name, value in flags_of(arguments).items() if name not in known]
        for first in range(0, len(new), _MAX_PARAMETERS):
            self._client.log_batch(self._run, params=new[first : first + _MAX_PARAMETERS])
        self._client.log_text(self._run, arguments, "resolved.args")

    def log_metrics(self, step: int, metrics: Metrics, wall_time: float) -> None:
        from mlflow.entities import Metric

        values = [Metric(name, float(value), int(1000 * wall_time), step) for name, value in metrics.items()]
        for first in range(0, len(values), _MAX_METRICS):
            self._client.log_batch(self._run, metrics=values[first : first + _MAX_METRICS])

    def log_rollouts(self, step: int, samples: Samples, purpose: Purpose) -> None:
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        name = (
            f"eval_{step:06d}_{samples[0]['name'].replace('/', '_')}"
            if purpose == "eval"
            else f"step_{step:06d}"
        )
        self._client.log_text(self._run, lines, f"rollouts/{name}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._run)

"""Log to Weights & Biases, online or offline (WANDB_MODE=offline), set up by its own environment
variables."""

from __future__ import annotations

import json
import os

from megarl.loggers.base import LoggerContext, Metrics, Purpose, Samples, flags_of

RUN_ID = "wandb_run_id"
"""File in the run folder with the id of the run, with which a resumed job continues that run."""


class WeightsAndBiases:
    """Logs metrics over the axis `step`, samples as tables, and flags as the configuration.

    Weights & Biases cannot remove what a run has logged: the steps that a resumed run makes again appear
    twice."""

    def __init__(self, context: LoggerContext) -> None:
        # HOME may be read-only; without a limit the end of the job waits for an upload for ever
        os.environ.setdefault("WANDB_DATA_DIR", f"{context.folder.absolute()}/wandb")
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "50")
        import wandb

        file = context.folder / RUN_ID
        known = file.read_text() if file.exists() and context.first_step is not None else None
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=context.project,
            name=context.name,
            dir=context.folder,
            id=known,
            resume="allow" if known else None,
            settings=settings,
        )
        file.write_text(self._run.id)
        self._table = wandb.Table
        self._run.define_metric("*", step_metric="step")

    def log_config(self, arguments: str) -> None:
        self._run.config.update(flags_of(arguments), allow_val_change=True)

    def log_metrics(self, step: int, metrics: Metrics, wall_time: float) -> None:
        self._run.log({"step": step, **metrics})

    def log_rollouts(self, step: int, samples: Samples, purpose: Purpose) -> None:
        columns = sorted({name for sample in samples for name in sample if not name.endswith("_ids")})
        rows = [[_cell(sample.get(name)) for name in columns] for sample in samples]
        self._run.log({"step": step, f"rollouts/{purpose}": self._table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()


def _cell(value: object) -> object:
    """Return a value that a table takes: chats and other structures as JSON."""
    return (
        value
        if value is None or isinstance(value, (str, int, float))
        else json.dumps(value, ensure_ascii=False)
    )

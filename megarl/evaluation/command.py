"""Implement `megarl eval`: check the evaluation, start its ranks, and return the exit code."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megarl.checks.job import check_everything
from megarl.config.render import write_args
from megarl.evaluation.arguments import (
    check_model,
    load_evaluation,
    split_options,
    with_model,
    with_settings_of_run,
)
from megarl.inspect.models import base_model, checkpoint_of, exported, model_folder
from megarl.trainer.executors import has_rank_processes


def main(argv: Sequence[str]) -> int:
    """Evaluate a model. Raises: ConfigError with all errors, before a rank is started."""
    options, rest = split_options(argv)
    rest = with_settings_of_run(rest)
    given = load_evaluation(rest)
    check_model(given)
    name = given.model.model
    folder = model_folder(name)
    config = with_model(given, folder or base_model(checkpoint_of(Path(name))), rest)
    # the weights of a checkpoint have no folder yet
    checked = replace(config, model=replace(config.model, random_init=folder is None))
    check_everything(checked, config.placement.world_size, new_run=False)
    with exported(name) as folder, tempfile.TemporaryDirectory(prefix="megarl-eval-") as scratch:
        config = replace(config, model=replace(config.model, model=str(folder)))
        from megarl.evaluation.job import evaluate_job, progress_of

        job = functools.partial(evaluate_job, options=options, model=name)
        if not has_rank_processes(config):
            from megarl.train import run_in_process

            return run_in_process(config, job, new_run=False, say=progress_of(options))
        from megarl.trainer.launch import launch

        # the ranks read the resolved configuration: no flag of the user's names an exported folder
        arguments = Path(scratch, "resolved.args")
        arguments.write_text(write_args(config), encoding="utf-8")
        return launch(
            config, [f"@{arguments}"], job, "megarl.evaluate", new_run=False, say=progress_of(options)
        )

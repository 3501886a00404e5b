"""Implement `megarl eval`: check the evaluation, start its ranks, and return the exit code."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megarl.checks.job import check_everything
from megarl.config.args_file import Reader
from megarl.config.errors import ConfigError
from megarl.config.render import write_args
from megarl.config.roles import with_each_actor
from megarl.config.schema import TrainConfig
from megarl.evaluation.arguments import (
    check_models,
    check_out,
    load_evaluation,
    names_of_models,
    split_options,
    with_models,
    with_models_of_run,
    with_settings_of_run,
)
from megarl.inspect.models import base_model, checkpoint_of, exported, model_folder
from megarl.trainer.executors import has_rank_processes, shared_folder


def main(argv: Sequence[str]) -> int:
    """Evaluate a model, or the models of several actors. Raises: ConfigError with all errors, before a rank is
    started."""
    options, rest = split_options(argv)
    rest = with_models_of_run(with_settings_of_run(rest))
    given = load_evaluation(rest)
    check_out(options, given)
    _check_nodes(given, rest)
    check_models(given)
    names = names_of_models(given)
    found = {name: model_folder(name) for name in names.values()}
    folders = {name: folder or base_model(checkpoint_of(Path(name))) for name, folder in found.items()}
    config = with_models(given, folders, rest)

    def checked(of_actor: TrainConfig, suffix: str) -> TrainConfig:
        # the weights of a checkpoint have no folder yet
        return replace(of_actor, model=replace(of_actor.model, random_init=found[names[suffix]] is None))

    check_everything(with_each_actor(config, checked), config.placement.world_size, new_run=False)
    with contextlib.ExitStack() as stack:
        shared = shared_folder(config)
        folders = {name: stack.enter_context(exported(name, shared)) for name in found}
        config = with_models(given, folders, rest)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-eval-", dir=shared))
        from megarl.evaluation.job import evaluate_job, progress_of

        job = functools.partial(evaluate_job, options=options, models=names)
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


def _check_nodes(config: TrainConfig, argv: Sequence[str]) -> None:
    """Raise ConfigError, with the place of the flag, for --nnodes above 1 under the executor torchrun."""
    placement = config.placement
    if placement.nnodes == 1 or placement.executor != "torchrun":
        return
    given = Reader()
    given.read(argv)
    flag = max((one for one in given.occurrences if one.base == "nnodes"), key=lambda one: one.level)
    rule = (
        "megarl eval starts ranks on this machine only. Try --nnodes 1, or --executor ray, or on every node "
        f"torchrun --nnodes {placement.nnodes} --nproc-per-node {placement.nproc_per_node} ... -m "
        "megarl.evaluate with the same arguments."
    )
    raise ConfigError([flag.error(rule)])

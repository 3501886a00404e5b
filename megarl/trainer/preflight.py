"""Find all errors of a job before a device is touched or a file is written."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.algorithms.base import algorithm_of
from megarl.config.check import check_job, of_all_actors
from megarl.config.environments import environments
from megarl.config.errors import raise_errors
from megarl.config.hf_config import ModelShape
from megarl.config.reward_models import needs_ground_truth
from megarl.config.roles import actors_of_episode, configs_of_actors
from megarl.config.rules_data import rows_errors
from megarl.config.rules_files import newest_job
from megarl.config.schema import TrainConfig
from megarl.config.teachers import teachers_errors, teachers_of
from megarl.data.encoder import fitting
from megarl.data.env_rows import first_rows
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import check_vocabulary, tokenizer_of
from megarl.episodes.probe import probe_environments
from megarl.rewards.pool import probe_rule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """Sizes of one actor's model and its data sets for training and evaluation, after all checks."""

    shape: ModelShape
    train: PromptDataset
    evaluation: PromptDataset | None
    num_sft_rows: int = 0
    """Rows of --sft-data."""

    def eval_rows(self, count: int | None) -> dict[int, str]:
        """Return the first `count` held-out rows (None: all), each with its data source."""
        return {row: prompt.data_source for row, prompt in enumerate((self.evaluation or ())[:count])}


def read_inputs(
    config: TrainConfig, world_size: int, new_run: bool = True, is_checked: bool = False
) -> dict[str, Inputs]:
    """Check the configuration, read data and tokenizer, and try the reward function. Returns the inputs of
    each actor, or raises ValueError with all errors.

    Args:
        new_run: whether --save must not hold a run yet (training) or is not written to (evaluation).
        is_checked: whether another machine has done all this, so that data and tokenizer are only read.
    Returns: suffix of each actor -> its inputs.
    Raises: ValueError with all errors."""
    if not is_checked:
        check_job(config, world_size, new_run)
    load = functools.cache(PromptDataset.load)  # actors mostly read the same files
    inputs = {
        suffix: _read(of_actor, load, suffix, probes=not is_checked)
        for suffix, of_actor in configs_of_actors(config).items()
    }
    raise_errors(_teachers_errors(config, inputs))
    if new_run and config.checkpoint.load is not None and (found := newest_job(config)) is not None:
        errors: list[str] = []
        for number, (suffix, of_actor) in enumerate(configs_of_actors(config).items(), 1):
            data = inputs[suffix]
            errors += rows_errors(of_actor, number, data.train.file_sizes, data.num_sft_rows, found[1])
        raise_errors(errors)
    return inputs


def _teachers_errors(config: TrainConfig, inputs: Mapping[str, Inputs]) -> list[str]:
    """Return an error for each data source of --teachers that no training row has, of any actor with the same
    teachers."""
    actors = configs_of_actors(config)

    def errors_of(of_actor: TrainConfig) -> list[str]:
        if not of_actor.data.train_data or not (given := teachers_of(algorithm_of(of_actor))):
            return []
        rows = (
            row
            for suffix, other in actors.items()
            if teachers_of(algorithm_of(other)) == given
            for row in inputs[suffix].train
        )
        return teachers_errors(algorithm_of(of_actor), (row.data_source for row in rows))

    return of_all_actors(config, errors_of)


def _read(config: TrainConfig, load: Callable[..., PromptDataset], suffix: str, probes: bool) -> Inputs:
    """Read the files of one actor. probes: try its environments or its reward function too."""
    shape = ModelShape.load(config.model.model)
    needs = (
        algorithm_of(config).row_needs
        if not algorithm_of(config).needs_rollout
        else "ground_truth"
        if needs_ground_truth(config)
        else None
    )
    train = PromptDataset(())  # an evaluation has no training data
    if config.data.train_data:
        train = load(config.data.train_data, prompt_key=config.data.prompt_key, needs=needs)
    evaluation = None
    if config.data.eval_data:
        evaluation = load(
            config.data.eval_data, prompt_key=config.data.prompt_key, needs=needs, flag="--eval-data"
        )
    tokenizer = tokenizer_of(config.model)
    assert tokenizer is not None  # only a `load_folder` of the caller's returns None
    check_vocabulary(tokenizer, shape.vocab_size, config.model.model)
    sft = None
    if config.sft.sft_data and config.data.train_data:
        sft = load(
            config.sft.sft_data, prompt_key=config.data.prompt_key, needs="response", flag="--sft-data"
        )
    fit = functools.partial(fitting, tokenizer=tokenizer, config=config, say=logger.warning)
    train = fit(train)
    if evaluation is not None:
        evaluation = fit(evaluation, flag="--eval-data")
    if sft is not None:
        sft = fit(sft, flag="--sft-data")
    datasets = [(train, "--train-data"), *([(evaluation, "--eval-data")] if evaluation is not None else [])]
    if probes:
        _probe(config, datasets, suffix)
    return Inputs(shape, train, evaluation, 0 if sft is None else len(sft))


def _probe(config: TrainConfig, datasets: list[tuple[PromptDataset, str]], suffix: str) -> None:
    """Try the environments, or the reward function, on the first rows of the data sets."""
    if config.episodes.env is not None:
        of_flag, actors = {flag: dataset for dataset, flag in datasets if dataset}, actors_of_episode(config)
        if not suffix or len(actors) == 1:  # actors that play together have one environment
            probe_environments(config.episodes, first_rows(environments(config.episodes), of_flag), actors)
    else:
        probe_rule(config, datasets)

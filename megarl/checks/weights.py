"""Check by file headers that the weights of every model folder can be loaded."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.check import of_all_actors
from megarl.config.errors import Errors
from megarl.config.hf_config import ModelShape
from megarl.config.hub import to_come
from megarl.config.reward_models import reward_models, value_model_shape
from megarl.config.schema import TrainConfig
from megarl.config.teachers import teacher_folders
from megarl.reshard.hf_folder import folder_problem

_ADVICE = "Copy or convert the folder again, or give another one."


def weight_errors(config: TrainConfig, trains: bool = True) -> list[str]:
    """Return one error per folder with missing or damaged files, or with tensors of another model.

    The configuration must have no other errors. `trains` is False for `megarl eval`, which loads only the
    policies."""
    return of_all_actors(config, lambda of_actor: list(_of_actor(of_actor, trains)))


def _of_actor(config: TrainConfig, trains: bool) -> Errors:
    for flag, folder, shape in _folders(config, trains):
        by_engine = any(one.path == folder and one.backend == "judge" for one in reward_models(config))
        if folder not in to_come and (problem := folder_problem(folder, shape, by_engine)) is not None:
            yield f"{flag} ({folder}): {problem.removesuffix('.')}. {_ADVICE}"


def _folders(config: TrainConfig, trains: bool) -> Iterator[tuple[str, str, ModelShape | None]]:
    """Yield (flag, folder, shape) of every model folder whose weights the job loads.

    The shape is None for models that transformers or vLLM loads and Megatron does not know."""
    model = config.model
    if not model.random_init:
        yield "--model", model.model, ModelShape.load(model.model)
    if not trains:
        return
    if config.critic is not None and model.critic_model and not model.random_init:
        yield "--critic-model", model.critic_model, ModelShape.load(model.critic_model, value_head=True)
    if config.algorithm.needs_reference and model.reference_model:
        yield "--reference-model", model.reference_model, ModelShape.load(model.reference_model)
    for folder in teacher_folders(config.algorithm):
        yield "--teachers", folder, ModelShape.load(folder)
    for reward in reward_models(config):
        yield (
            "--reward-model",
            reward.path,
            value_model_shape(reward.path) if reward.backend == "megatron" else None,
        )

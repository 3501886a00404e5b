"""Check a configuration by all rules that concern several fields, the model's shape or the number of ranks.

The rules run before any device is touched. All broken rules are reported at once, each as `flag (value):
rule. Try ...`. A rule of a single field stands beside the field in the schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megarl.config import rules_episodes as episodes
from megarl.config import rules_algorithm, rules_data
from megarl.config import rules_layout as layout
from megarl.config import rules_preference, rules_reference, rules_run
from megarl.config import rules_rollout as rollout
from megarl.config import rules_sft, rules_shared_episodes
from megarl.config import rules_streaming as streaming
from megarl.config import rules_training as training
from megarl.config.args_file import numbered
from megarl.config.errors import ConfigError, Errors, raise_errors
from megarl.config.flags import OF_JOB, flag_name
from megarl.config.hf_config import ModelShape
from megarl.config.kv_cache import kv_cache
from megarl.config.installed import apex_error, megatron_error, tracker_errors
from megarl.config.mesh import engine_mode
from megarl.config.reward_models import reward_errors
from megarl.config.roles import configs_of_actors, place, trained_models
from megarl.config.rules_files import checkpoint_errors, path_errors
from megarl.config.rules_layout import Job
from megarl.config.run_sections import RankCount
from megarl.config.schema import TrainConfig

Rule = Callable[[Job], Iterable[str]]
LAYOUT: list[Rule] = [layout.executor, layout.idle_ranks_of_actor, layout.megatron_roles]
ENGINE_LAYOUT: list[Rule] = [layout.engine_ranks, layout.engine_split, rollout.backend_options, kv_cache]
TRAINING: list[Rule] = [
    training.experts_of_dense_model,
    training.expert_balance,
    training.routing_replay,
    training.fp8,
    training.batch,
    rules_preference.answers_of_data,
    rules_preference.preference,
    rules_reference.reference_model,
    rules_reference.reference_updates,
    rules_reference.teaching,
    training.optimizer,
    training.lora,
    training.evaluation_in_training,
    training.offload,
    training.hybrid_optimizer,
    training.fsdp,
    training.critic,
    training.sequence_length,
    rules_run.run,
    rules_run.profile,
    rules_algorithm.dynamic_sampling,
    rules_algorithm.cost_score,
    rules_sft.sft_stream,
    rules_data.curriculum,
    episodes.episodes,
    streaming.staleness,
    streaming.routing_replay,
    streaming.max_tokens_per_step,
    streaming.min_engines,
    streaming.eval_engines,
    streaming.replay,
]
OF_TRAINING: list[Rule] = [
    layout.idle_ranks_of_actor,
    training.expert_balance,
    training.batch,
    training.optimizer,
    training.evaluation_in_training,
    rules_run.run,
    rules_run.profile,
    rules_algorithm.dynamic_sampling,
    streaming.staleness,
    streaming.routing_replay,
    streaming.max_tokens_per_step,
    streaming.min_engines,
    streaming.eval_engines,
    streaming.replay,
]
"""Rules that an evaluation cannot break: it updates no weights, and ranks of a run's critic may be idle."""
EVALUATION: list[Rule] = [training.evaluation_alone]
SAMPLING: list[Rule] = [
    training.sampling,
    training.algorithm,
    rules_algorithm.conditions,
]
_FLAGS_OF_JOB = frozenset(flag_name(field) for _, field in OF_JOB)


def check(
    config: TrainConfig,
    shape: ModelShape | None,
    world_size: int,
    new_run: bool = True,
    critic_shape: ModelShape | None = None,
) -> list[str]:
    """Return the errors in the configuration of one actor and its roles, one text each; [] if there are none.

    Args:
        shape: shape of config.model.model. None skips the rules about the shape, because config.json itself
            has errors.
        world_size: number of ranks of the job.
        new_run: whether --save is going to be written, so it must not hold a run. False for an evaluation.
        critic_shape: shape of the critic's model, with its value head. Default: `shape`.
    """
    rules = LAYOUT + TRAINING
    if not new_run:
        rules = [rule for rule in rules if rule not in OF_TRAINING] + EVALUATION
    if config.algorithm.needs_rollout:
        rules = rules + ENGINE_LAYOUT + (SAMPLING if new_run else [])
    return [
        *filter(None, [megatron_error(), apex_error()]),
        *_broken(rules, config, shape, critic_shape, world_size),
        *reward_errors(config),
        *tracker_errors(config.run.log_with),
        *path_errors(config, new_run),
    ]


def _broken(
    rules: Sequence[Rule],
    config: TrainConfig,
    shape: ModelShape | None,
    critic_shape: ModelShape | None,
    world_size: int,
) -> list[str]:
    """Return the errors of one actor, each once: those in its --...-ranks flags, and those that the rules
    yield."""
    ranks, errors = place(config, world_size)
    job = Job(config, shape, critic_shape or shape, world_size, ranks)
    return list(dict.fromkeys([*errors, *(error for rule in rules for error in rule(job))]))


def check_layout(config: TrainConfig, world_size: int) -> None:
    """Raise ConfigError with all errors in ranks, parallel sizes and the model's shape. No weights, data or
    run folder need exist."""

    def errors_of(of_actor: TrainConfig) -> list[str]:
        *shapes, errors = _load_shapes(of_actor)
        rules = LAYOUT + (ENGINE_LAYOUT if of_actor.algorithm.needs_rollout else [])
        return errors or _broken(rules, of_actor, *shapes, world_size)

    raise_errors([*of_all_actors(config, errors_of), *actors_errors(config, world_size)])


def check_job(config: TrainConfig, world_size: int, new_run: bool = True) -> ModelShape:
    """Check the configuration of all actors and return the first actor's `ModelShape`. Raises: ConfigError
    with `job_errors`."""
    raise_errors(job_errors(config, world_size, new_run))
    return ModelShape.load(config.model.model)


def job_errors(config: TrainConfig, world_size: int, new_run: bool) -> list[str]:
    """Return the errors in every actor's configuration and in the models' config.json, one text each.

    If there are none, return the errors of --load."""

    def errors_of(of_actor: TrainConfig) -> list[str]:
        shape, critic_shape, errors = _load_shapes(of_actor)
        return errors + check(of_actor, shape, world_size, new_run, critic_shape)

    errors = [*of_all_actors(config, errors_of), *actors_errors(config, world_size, new_run)]
    errors = errors or elastic_errors(config)
    return errors or (checkpoint_errors(config) if new_run else [])


def on_nodes(config: TrainConfig, count: int) -> TrainConfig:
    """Return the configuration of a job on another number of nodes."""
    return replace(config, placement=replace(config.placement, nnodes=count))


def on_started_ranks(config: TrainConfig, world_size: int, nodes: int) -> TrainConfig:
    """Return the configuration with the numbers of nodes and ranks that torchrun has started. The flags may
    say otherwise.

    No flags can say that nodes have different numbers of ranks: 3 + 1 ranks count as 2 + 2, and where the
    nodes do not divide the ranks the configuration stays as it is."""
    if world_size % nodes:
        return config
    per_node = RankCount(world_size // nodes)
    return replace(config, placement=replace(config.placement, nnodes=nodes, nproc_per_node=per_node))


def fitting_nodes(config: TrainConfig) -> list[int]:
    """Return the numbers of nodes on which an attempt of a job may run, largest first: --nnodes, and with
    --elastic-min-nodes the smaller ones that the layout fits."""
    most = config.placement.nnodes
    least = config.placement.elastic_min_nodes or most
    return [most, *(count for count in range(most - 1, least - 1, -1) if not _misfit(config, count))]


def elastic_errors(config: TrainConfig) -> list[str]:
    """Return the error of an --elastic-min-nodes that means nothing, or that the layout does not fit."""
    placement, least = config.placement, config.placement.elastic_min_nodes
    if least is None:
        return []
    flag = f"--elastic-min-nodes ({least})"
    if placement.executor != "ray":
        return [f"{flag}: is for --executor ray. Under torchrun give its own --nnodes a range, such as 1:2."]
    if least > placement.nnodes:
        return [f"{flag}: must be at most --nnodes ({placement.nnodes}). Try {placement.nnodes}."]
    if (misfit := _misfit(config, least)) is None:
        return []
    advice = f"Try {fitting_nodes(config)[-1]}. On {least}: {misfit}"
    return [f"{flag}: the layout must fit that many nodes. {advice}"]


def _misfit(config: TrainConfig, count: int) -> str | None:
    """Return the first reason why the layout of a job does not fit a number of nodes, or None."""
    smaller = on_nodes(config, count)
    try:
        check_layout(smaller, smaller.placement.world_size)
    except ConfigError as error:
        return error.errors[0]
    return None


def _load_shapes(config: TrainConfig) -> tuple[ModelShape | None, ModelShape | None, list[str]]:
    """Return the shapes of the actor's and the critic's model (None if absent or with errors), and the errors
    in their config.json."""
    shapes: dict[str, ModelShape] = {}
    errors: list[str] = []
    for role, model in trained_models(config).items():
        try:
            shapes[role] = model.shape
        except ConfigError as error:
            if role == "actor":
                errors += error.errors
            elif config.model.critic_model:  # one folder for both has the actor's errors
                errors += [line.replace("--model ", "--critic-model ", 1) for line in error.errors]
    return shapes.get("actor"), shapes.get("critic"), errors


def of_all_actors(config: TrainConfig, errors_of: Callable[[TrainConfig], Iterable[str]]) -> list[str]:
    """Call `errors_of` for the configuration of every actor and return all errors. From the second actor on
    each begins with the actor's name.

    An error that the first actor has too is reported for the first actor only."""
    found: list[str] = []
    for suffix, of_actor in configs_of_actors(config).items():
        new = [error for error in errors_of(of_actor) if error not in found]
        found += [f"actor{suffix}: {_with_number(line, int(suffix[1:]))}" for line in new] if suffix else new
    return found


def _with_number(line: str, number: int) -> str:
    """Return an error's text with its flags renamed to those of one actor, e.g. --actor-2-seed in place of
    --seed."""

    def flag(match: re.Match) -> str:
        name = match[2] if match[2] in _FLAGS_OF_JOB else numbered(match[2], number)
        return f"--{match[1] or ''}{name}"

    return re.sub(r"--(no-)?([a-z][a-z0-9-]*)", flag, line)


def actors_errors(config: TrainConfig, world_size: int, new_run: bool = True) -> Errors:
    """Yield an error per broken rule about several actors in one job; none for a job with one actor.

    Args:
        new_run: False for an evaluation, which may leave ranks without work."""
    if config.placement.num_actors == 1 and not config.others:
        return
    head, actors = f"--num-actors ({config.placement.num_actors})", configs_of_actors(config)
    if config.placement.num_actors != len(actors):
        yield f"{head}: must be the number of actors that are configured ({len(actors)})."
    if not all(of_actor.algorithm.needs_rollout for of_actor in actors.values()):
        yield (
            f"{head}: each actor must learn from samples, and supervised fine-tuning does not. Start a job "
            "for each, or try --algorithm grpo."
        )
        return
    if any(of_actor.batch.dynamic_sampling for of_actor in actors.values()):
        yield f"{head}: --dynamic-sampling is not built for several actors. Leave --dynamic-sampling out."
    yield from rules_shared_episodes.shared_episodes(actors, world_size)
    ranks, broken, inside = {}, [], []
    for suffix, of_actor in actors.items():
        if len(models := of_actor.reward_models.reward_model) > 1:
            yield (
                f"{head}: with several actors each has one reward model, which has its number, and "
                f"actor{suffix} has {len(models)}."
            )
        placed, errors = place(of_actor, world_size)
        ranks |= {f"{role}{suffix}": of_role for role, of_role in placed.items()}
        broken += errors
        if not errors and engine_mode(of_actor, world_size) == "in-process":
            inside.append(suffix)
    if broken:
        return  # the actor's own errors report the lists
    if new_run:
        yield from layout.idle_ranks(ranks, world_size)
    if len(inside) > 1:
        flag = numbered("rollout-engine", int(inside[1][1:]))
        yield (
            "--rollout-engine (in-process): vLLM has room for one engine in a process. Leave it out, or try "
            f"--{flag} out-of-process."
        )

"""List the roles of a job, and place them on ranks by flags like 0-3,6 or by names of pools of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megarl.config.hf_config import ModelShape
from megarl.config.schema import LoRAConfig, OptimizerConfig, TrainConfig
from megarl.role_names import TRAINED_KINDS, kind_and_suffix, suffix_of

Ranks = tuple[int, ...]


KINDS = ("actor", "reference", "critic", "reward", "rollout")
"""Kinds of role as flags name them, in the order of set-up. `reward` stands for all reward models."""


def checkpointed_roles(config: TrainConfig, roles: Iterable[str]) -> list[str]:
    """Return the roles of a job that its checkpoints hold: the trained ones, and references that change."""
    configs = configs_of_actors(config)
    changing = {
        f"reference{suffix}"
        for suffix, one in configs.items()
        if one.model.reference_update_interval is not None
    }
    return [role for role in roles if kind_and_suffix(role)[0] in TRAINED_KINDS or role in changing]


def tells_experts(config: TrainConfig, shape: ModelShape) -> bool:
    """Return whether the engines of a model of this shape report to which experts each token was routed."""
    return shape.is_moe and config.experts.moe_routing_replay == "engine"


class TrainedModel(NamedTuple):
    """Folder, optimizer and adapters of a role that is trained: an actor or a critic."""

    folder: str
    optimizer: OptimizerConfig
    lora: LoRAConfig
    value_head: bool = False

    @property
    def shape(self) -> ModelShape:
        return ModelShape.load(self.folder, self.value_head)


def trained_models(config: TrainConfig) -> dict[str, TrainedModel]:
    """Return role -> model for one actor and, if it has one, its critic."""
    of_actor = config.model.model, config.optimizer, config.lora
    models = {"actor": TrainedModel(*of_actor, value_head=config.algorithm.trains_scores)}
    if config.critic is not None:
        critic = config.model.critic_folder, config.critic_optimizer, config.critic_lora
        models["critic"] = TrainedModel(*critic, value_head=True)
        if config.algorithm.needs_cost_critic:
            models["cost_critic"] = models["critic"]
    return models


def absent_roles(algorithm: object, reward_models: tuple[str, ...]) -> dict[str, str]:
    """Return kind of role -> reason for the roles that an actor does not have.

    Args:
        algorithm: an instance of one of megarl/algorithms.
        reward_models: folders of --reward-model."""
    reasons = {
        "reference": not algorithm.needs_reference and "no KL to it is counted (--kl-mode none)",
        "critic": not algorithm.needs_critic and "this algorithm has no critic",
        "reward": not (reward_models and algorithm.needs_rollout) and "no --reward-model is given",
        "rollout": not algorithm.needs_rollout and "this algorithm samples nothing",
    }
    return {role: reason for role, reason in reasons.items() if reason}


def trains_in_fp32(config: TrainConfig) -> bool:
    """Return whether some actor's weights are fp32.

    The log-probs of such an actor are compared with the engine's at the limits of fp32 rounding."""
    return any(not of_actor.model.bf16 for of_actor in configs_of_actors(config).values())


def configs_of_actors(config: TrainConfig) -> dict[str, TrainConfig]:
    """Return suffix -> configuration of each actor; the suffix is "" for the first, "_2" for the second."""
    return {suffix_of(index): one for index, one in enumerate((config, *config.others))}


def with_each_actor(config: TrainConfig, change: Callable[[TrainConfig, str], TrainConfig]) -> TrainConfig:
    """Return the configuration of a job in which every actor's is changed.

    Args:
        change: configuration and suffix of an actor -> its new configuration."""
    first, *others = (change(one, suffix) for suffix, one in configs_of_actors(config).items())
    return replace(first, others=tuple(others))


def actors_of_episode(config: TrainConfig) -> list[str]:
    """Return the names by which an environment tells apart the actors that play in an episode: all of the job with
    --share-episodes, else "actor" alone, whichever actor of the job it is."""
    count = config.placement.num_actors if config.episodes.share_episodes else 1
    return [f"actor{suffix_of(index)}" for index in range(count)]


def parse_ranks(text: str, world_size: int) -> Ranks:
    """Return the ranks that a text lists, in ascending order: parse_ranks("0-2,6", 8) == (0, 1, 2, 6).

    Raises: ValueError for a malformed list, for ranks that do not ascend, and for a rank outside the world.
    """
    advice = f"Try {f'0-{world_size - 1}' if world_size > 1 else '0'}."
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part)
        if match is None:
            raise ValueError(f"ranks ({text}): must be ranks and ranges of ranks, like 0-3 or 0,2. {advice}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or ranks and first <= ranks[-1]:
            raise ValueError(f"ranks ({text}): must ascend, each rank once. {advice}")
        if last >= world_size:
            raise ValueError(f"ranks ({text}): must be below the number of ranks ({world_size}). {advice}")
        ranks += range(first, last + 1)
    return tuple(ranks)


def parse_pools(pools: tuple[str, ...]) -> dict[str, str]:
    """Return pool -> its ranks as text: ("train=0-3", "serve=4") gives {"train": "0-3", "serve": "4"}.

    Raises: ValueError for a pool that is not name=ranks, and for a name that comes twice or could be a list
    of ranks."""
    named: dict[str, str] = {}
    for pool in pools:
        name, equals, text = pool.partition("=")
        if not equals or not name.isidentifier() or name in named:
            raise ValueError(f"pools ({pool}): must be name=ranks, each name once. Try train=0-3.")
        named[name] = text
    return named


class DeviceMap:
    """Placement of roles in Python: DeviceMap(actor=[0, 1], critic=[2], reward=[3]).

    A role that is left out is placed by its flag's default. Roles: actor, critic, reference, reward,
    rollout, and those of further actors: DeviceMap(actor=[0], actor_2=[1], rollout=[0], rollout_2=[1]).
    `reward` may hold a list of ranks per reward model: reward=[[2], [3]].

    Raises: TypeError for another role."""

    def __init__(self, **ranks: Sequence[int] | Sequence[Sequence[int]] | None) -> None:
        for role in ranks:
            if kind_and_suffix(role)[0] not in KINDS:
                raise TypeError(
                    f"DeviceMap has no role ({role}): {', '.join(KINDS)}, or one of these with a "
                    "number, like actor_2."
                )
        self.ranks = {role: of_role for role, of_role in ranks.items() if of_role is not None}

    def flags(self) -> list[str]:
        """Return the placement as words of a command line, e.g. ["--actor-ranks", "0,1"]."""
        flags = []
        for role, ranks in self.ranks.items():
            lists = ranks if ranks and not isinstance(ranks[0], int) else [ranks]
            flags += [f"--{role.replace('_', '-')}-ranks", *(",".join(map(str, one)) for one in lists)]
        return flags


def place(config: TrainConfig, world_size: int) -> tuple[dict[str, Ranks | None], list[str]]:
    """Return role -> ranks for the roles of one actor, and the errors in the flags that place them.

    The ranks are None if the role's flag has an error. The roles are in the order of set-up: actor,
    reference, critic, reward models, rollout. Rule rewards are computed on the rollout ranks."""
    errors: list[str] = []
    try:
        pools = parse_pools(config.placement.pools)
    except ValueError as error:
        pools = None
        errors.append(f"--{error}")

    def ranks_of(role: str, text: str | None) -> Ranks | None:
        if pools is None:
            return None
        if text is None:
            return tuple(range(world_size))
        try:
            return parse_ranks(pools.get(text, text), world_size)
        except ValueError as error:
            is_unknown_pool = pools and text not in pools and text.isidentifier()
            known = f" Pools: {', '.join(pools)}." if is_unknown_pool else ""
            pool = f"{role}-ranks is pool {text}, whose " if text in pools else f"{role}-"
            errors.append(f"--{pool}{error}{known}")
            return None

    placed = {
        role: ranks_of(role.removeprefix("cost_").partition("_model")[0], text)
        for role, text in _rank_flags(config)
    }
    if "reference" in placed and config.placement.reference_ranks is None:
        placed["reference"] = placed["actor"]
    given, count = config.placement.reward_ranks, len(config.reward_models.reward_model)
    if count and len(given) > 1 and len(given) != count:
        errors.append(
            f"--reward-ranks ({' '.join(given)}): must be one list for all reward models, or one for each of "
            f"the {count}. Try --reward-ranks {given[0]}."
        )
        placed |= {role: None for role in placed if role.startswith("reward_model")}
    return placed, errors


def _rank_flags(config: TrainConfig) -> Iterator[tuple[str, str | None]]:
    """Yield (role, value of its --...-ranks flag) for every role of the actor."""
    placement = config.placement
    absent = absent_roles(config.algorithm, config.reward_models.reward_model)
    for kind in KINDS:
        if kind in absent:
            continue
        if kind != "reward":
            yield kind, getattr(placement, f"{kind}_ranks")
            if kind == "critic" and config.algorithm.needs_cost_critic:
                yield "cost_critic", placement.critic_ranks
            continue
        count, given = len(config.reward_models.reward_model), placement.reward_ranks
        lists = given if len(given) > 1 else (*given, None)[:1] * count
        yield from zip([f"reward_model{suffix_of(index)}" for index in range(count)], lists)


def role_ranks(config: TrainConfig, world_size: int) -> Mapping[str, Ranks]:
    """Return role -> ranks for the roles of one actor. Raises: ValueError with all errors in the flags that
    place them."""
    placed, errors = place(config, world_size)
    if errors:
        raise ValueError("\n".join(errors))
    return placed

"""Which roles a job has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.role_names import suffix_of

if TYPE_CHECKING:
    from megarl.config.hf_config import ModelShape
    from megarl.config.schema import TrainConfig

KINDS = ("actor", "reference", "critic", "reward", "rollout")
"""As flags call them, in the order in which they are set up. `reward` stands for all reward models."""


def tells_experts(config: TrainConfig, shape: ModelShape) -> bool:
    """Whether engines of a model of this shape report to which experts they sent each token."""
    return shape.is_moe and config.experts.moe_routing_replay == "engine"


def absent_roles(algorithm: object, reward_models: tuple[str, ...]) -> dict[str, str]:
    """Kind of role that an actor has not -> why. The actor is never absent.

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


def present_roles(config: TrainConfig) -> list[str]:
    """The other KINDS."""
    absent = absent_roles(config.algorithm, config.reward_models.reward_model)
    return [kind for kind in KINDS if kind not in absent]


def trains_in_fp32(config: TrainConfig) -> bool:
    """Whether some actor's weights are fp32: its log-probs are then compared with an engine's at fp32
    rounding."""
    return any(not of_actor.model.bf16 for of_actor in configs_of_actors(config).values())


def configs_of_actors(config: TrainConfig) -> dict[str, TrainConfig]:
    """Suffix of each actor -> the configuration as this actor and the roles of its number see it, their
    numbers left out."""
    return {suffix_of(index): one for index, one in enumerate((config, *config.others))}

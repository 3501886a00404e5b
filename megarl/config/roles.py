"""Which roles a job has."""

from __future__ import annotations


def absent_roles(algorithm: object, reward_models: tuple[str, ...]) -> dict[str, str]:
    """Megatron role that the job has not -> why. The actor is never absent.

    Args:
        algorithm: an instance of one of megarl/algorithms.
        reward_models: folders of --reward-model."""
    reasons = {
        "critic": not algorithm.needs_critic and "this algorithm has no critic",
        "reference": not algorithm.needs_reference and "no KL to it is counted (--kl-mode none)",
        "reward": not reward_models and "no --reward-model is given",
    }
    return {role: reason for role, reason in reasons.items() if reason}

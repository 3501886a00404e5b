"""Names of roles: a kind, and from the second of the kind on a number: critic, critic_2.

Where there are several actors, the roles with an actor's number are its own: actor_2 samples with rollout_2
and learns with critic_2."""

from __future__ import annotations

import re
from collections.abc import Container

TRAINED_KINDS = ("actor", "critic")
"""Roles with an optimizer: checkpoints hold these."""


def kind_and_suffix(role: str) -> tuple[str, str]:
    """("reward_model", "_2") of reward_model_2; the first of a kind has no suffix."""
    match = re.fullmatch(r"(.+?)(_(?:[2-9]|[1-9]\d+))?", role)
    return match[1], match[2] or ""


def suffix_of(index: int) -> str:
    """ "" of the first (index 0), "_2" of the second, ..."""
    return f"_{index + 1}" if index else ""


def actor_suffix(role: str, roles: Container[str]) -> str:
    """Suffix of the actor, of those among `roles`, that the role belongs to. Example: of reward_model_2 "_2"
    beside actor_2, else ""."""
    suffix = kind_and_suffix(role)[1]
    return suffix if f"actor{suffix}" in roles else ""


def with_suffix(metric: str, suffix: str) -> str:
    """Name of an actor's metric: policy/loss of the first, policy_2/loss of the second."""
    return metric.replace("/", f"{suffix}/", 1)

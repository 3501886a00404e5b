"""Parse and build the names of roles: a kind and, from the second role of a kind on, a number ("critic",
"critic_2").

If there are several actors, a role with an actor's number belongs to that actor: actor_2 samples with
rollout_2 and learns with critic_2."""

from __future__ import annotations

import re
from collections.abc import Container

TRAINED_KINDS = ("actor", "critic", "cost_critic")
"""Kinds of role that have an optimizer. Checkpoints hold these roles."""


def kind_and_suffix(role: str) -> tuple[str, str]:
    """Return the kind and the suffix of a role name: ("reward_model", "_2"), or ("critic", "") for the first
    of a kind."""
    match = re.fullmatch(r"(.+?)(_(?:[2-9]|[1-9]\d+))?", role)
    return match[1], match[2] or ""


def suffix_of(index: int) -> str:
    """Return the suffix of the role at an index of its kind: "" at 0, "_2" at 1."""
    return f"_{index + 1}" if index else ""


def number_of(suffix: str) -> int:
    """Return the number that flags have for a suffix: 1 for "", 2 for "_2"."""
    return int(suffix[1:]) if suffix else 1


def actor_suffix(role: str, roles: Container[str]) -> str:
    """Return the suffix ("", "_2") of the actor that a role works for.

    Example: reward_model_2 gives "_2" if there is an actor_2, else ""."""
    suffix = kind_and_suffix(role)[1]
    return suffix if f"actor{suffix}" in roles else ""


def with_suffix(metric: str, suffix: str) -> str:
    """Return the name of an actor's metric: policy/loss for the first actor, policy_2/loss for the second."""
    return metric.replace("/", f"{suffix}/", 1)

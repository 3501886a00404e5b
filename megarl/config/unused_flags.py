"""Warn of flags that have no effect, because the flag that they belong to is off.

They are no errors: a role may have them from the flags of all roles, or a resumed run from its resolved.args."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megarl.config.check import of_all_actors
from megarl.config.flags import flag_name, refuse_set
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig

Sections = Iterator[tuple[str, Any]]
"""Prefix of a role's flags, such as critic-, and the section of the configuration that holds their values."""


def _optimizers(config: TrainConfig) -> Sections:
    if config.critic is None or config.critic_optimizer in (None, config.optimizer):
        yield "", config.optimizer
    else:
        yield "actor-", config.optimizer
        yield "critic-", config.critic_optimizer


def _algorithm(config: TrainConfig) -> Sections:
    yield "", config.algorithm


def _checkpoint(config: TrainConfig) -> Sections:
    yield "", config.checkpoint


def _profile(config: TrainConfig) -> Sections:
    yield "", config.profile


@dataclass(frozen=True, slots=True)
class Switch:
    """A flag without which others have no effect.

    Args:
        sections: yields the sections that hold the flag, of an actor and its roles.
        is_on: returns whether the flag is on in a section.
        fields: fields of a section that have no effect while it is off.
        reason: why, and what to write instead, with {prefix} for the prefix of the role's flags."""

    sections: Callable[[TrainConfig], Sections]
    is_on: Callable[[Any], bool]
    fields: tuple[str, ...]
    reason: str


SWITCHES = (
    Switch(
        _optimizers,
        lambda values: values.lr_decay_style != "constant",
        ("min_lr", "lr_decay_iters"),
        "has no effect with --{prefix}lr-decay-style constant. Leave it out, or try --{prefix}lr-decay-style cosine.",
    ),
    Switch(
        _algorithm,
        lambda algorithm: getattr(algorithm, "kl_controller", None) == "adaptive",
        ("kl_target", "kl_horizon"),
        "has no effect without --kl-controller adaptive. Leave it out, or set that.",
    ),
    Switch(
        _algorithm,
        lambda algorithm: getattr(algorithm, "overlong_buffer", None) is not None,
        ("overlong_penalty",),
        "has no effect without --overlong-buffer. Leave it out, or set that.",
    ),
    Switch(
        _checkpoint,
        lambda checkpoint: checkpoint.best_metric is not None,
        ("best_metric_mode",),
        "has no effect without --best-metric. Leave it out, or set that.",
    ),
    Switch(
        _profile,
        lambda profile: profile.profile is not None,
        ("profile_step_start", "profile_step_end", "profile_ranks"),
        "has no effect without --profile. Leave it out, or add --profile torch.",
    ),
)


def unused_flags(config: TrainConfig) -> list[str]:
    """Return a warning for each flag that has another value than its default and no effect.

    A value that has an effect in another role or actor is passed over: the flag of all roles gave it."""
    actors = [*configs_of_actors(config).values()]
    return of_all_actors(config, lambda of_actor: _of_actor(of_actor, actors))


def _of_actor(config: TrainConfig, actors: Iterable[TrainConfig]) -> Iterator[str]:
    for switch in SWITCHES:
        used = [node for actor in actors for _, node in switch.sections(actor) if switch.is_on(node)]
        for prefix, node in switch.sections(config):
            unused = [
                name for name in switch.fields if hasattr(node, name) and not _is_used(node, name, used)
            ]
            if unused and not switch.is_on(node):
                flags = {name: f"--{flag_name(name, prefix)}" for name in unused}
                yield from refuse_set(
                    node, switch.reason.format(prefix=prefix), *unused, flag_of=flags.__getitem__
                )


def _is_used(node: object, name: str, used: Iterable[object]) -> bool:
    return any(getattr(other, name, None) == getattr(node, name) for other in used)

"""Rules about several actors in one job: what one actor's configuration cannot show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from megarl.config.flags import OF_JOB, flag_name, numbered
from megarl.config.mesh import engine_mode
from megarl.config.placement import place
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.role_names import kind_and_suffix

_OF_JOB = frozenset(flag_name(field) for _, field in OF_JOB)


def of_all_actors(config: TrainConfig, findings_of: Callable[[TrainConfig], Sequence[str]]) -> list[str]:
    """What is found of each actor, whose name stands before it; what is wrong with the first too is said of
    that alone."""
    found: list[str] = []
    for suffix, of_actor in configs_of_actors(config).items():
        found += [
            f"actor{suffix}: {_with_number(line, int(suffix[1:]))}" if suffix else line
            for line in findings_of(of_actor)
            if line not in found
        ]
    return found


def _with_number(line: str, number: int) -> str:
    """Its flags as this actor's are written: --actor-2-seed of --seed."""
    return re.sub(
        r"--(no-)?([a-z][a-z0-9-]*)",
        lambda match: f"--{match[1] or ''}{match[2] if match[2] in _OF_JOB else numbered(match[2], number)}",
        line,
    )


def actors_findings(config: TrainConfig, world_size: int, new_run: bool = True) -> list[str]:
    """Every rule that is broken by there being several; [] for one actor."""
    if config.placement.num_actors == 1 and not config.others:
        return []
    return list(_actors(config, world_size, new_run))


def _actors(config: TrainConfig, world_size: int, new_run: bool) -> Iterator[str]:
    head, actors = f"--num-actors ({config.placement.num_actors})", configs_of_actors(config)
    if config.placement.num_actors != len(actors):
        yield f"{head}: must be the number of actors that are configured ({len(actors)})."
    if not new_run:
        yield f"{head}: an evaluation is of one model. Leave it out."
    if not all(of_actor.algorithm.needs_rollout for of_actor in actors.values()):
        yield (
            f"{head}: each actor must learn from samples, and supervised fine-tuning does not. "
            "Start a job for each, or try "
            "--algorithm grpo."
        )
        return
    for suffix, of_actor in actors.items():
        if len(models := of_actor.reward_models.reward_model) > 1:
            yield (
                f"{head}: with several actors each has one reward model, which has its number, "
                f"and actor{suffix} has {len(models)}."
            )
    ranks, broken = {}, False
    for suffix, of_actor in actors.items():
        placed, findings = place(of_actor, world_size)
        ranks |= {f"{role}{suffix}": of_role for role, of_role in placed.items()}
        broken |= bool(findings)
    if broken:
        return  # what is wrong with the lists is said of the actor
    yield from idle_findings(ranks, world_size)
    inside = [
        suffix for suffix, of_actor in actors.items() if engine_mode(of_actor, world_size) == "in-process"
    ]
    if len(inside) > 1:
        flag = numbered("rollout-engine", int(inside[1][1:]))
        yield (
            "--rollout-engine (in-process): vLLM has room for one engine in a process. Leave it "
            f"out, or try --{flag} out-of-process."
        )


def idle_findings(ranks_of: Mapping[str, Sequence[int] | None], world_size: int) -> Iterator[str]:
    """A rank that no role is on; None: a list that is wrong."""
    if not all(ranks_of.values()):
        return
    idle = [rank for rank in range(world_size) if not any(rank in ranks for ranks in ranks_of.values())]
    if idle:
        flags = list(dict.fromkeys(_ranks_flag(role) for role in ranks_of))
        advice = (
            f"--nproc-per-node {idle[0]}"
            if idle[-1] - idle[0] == len(idle) - 1 == world_size - 1 - idle[0]
            else f"{flags[0]} 0-{world_size - 1}"
        )
        yield f"{' and '.join(flags)}: leave rank {idle[0]} of {world_size} ranks without work. Try {advice}."


def _ranks_flag(role: str) -> str:
    """Reward models share theirs; those of another actor have its number."""
    kind, suffix = kind_and_suffix(role)
    return "--reward-ranks" if kind == "reward_model" else f"--{kind}{suffix.replace('_', '-')}-ranks"

"""Combine the flows of all actors of a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megarl.config.roles import configs_of_actors
from megarl.flow import Flow
from megarl.role_names import actor_suffix, kind_and_suffix

if TYPE_CHECKING:
    from megarl.config.schema import TrainConfig


def flow_of_actors(config: TrainConfig, roles: Iterable[str]) -> Flow:
    """Return the calls of one training step of all actors of a job, each by its own algorithm. `roles`: names
    of all roles of the job."""
    roles, flows = list(roles), []
    for suffix, of_actor in configs_of_actors(config).items():
        mine = [role for role in roles if actor_suffix(role, roles) == suffix]
        flows.append(
            of_actor.algorithm.flow([kind_and_suffix(role)[0] for role in mine] if suffix else mine).of_actor(
                suffix
            )
        )
    flow, staleness = flows[0].beside(*flows[1:]), config.streaming.staleness
    return flow.with_staleness(staleness) if staleness else flow

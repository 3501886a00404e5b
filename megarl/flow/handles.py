"""Hold the handles on the roles of a training job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megarl.flow.job_roles import Actor, CostCritic, Critic, Data, Reference, Reward, RewardModel, Rollout
from megarl.flow.role import Caller, role_class


class Roles:
    """Handles on the roles of a job, by name: `roles.actor`, `roles.critic_2`."""

    actor: Actor
    critic: Critic
    cost_critic: CostCritic
    reference: Reference
    rollout: Rollout
    reward: Reward
    reward_model: RewardModel
    data: Data

    def __init__(self, caller: Caller, names: Iterable[str]) -> None:
        self._handles = {name: role_class(name)(caller, name) for name in names}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._handles:
            raise AttributeError(f"role ({name}): this job has {', '.join(self._handles)}.")
        return self._handles[name]

    def __getitem__(self, name: str) -> Any:
        return self._handles[name]

    def __contains__(self, name: object) -> bool:
        return name in self._handles

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __dir__(self) -> Iterable[str]:
        return list(self)

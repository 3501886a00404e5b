"""Own the state of a training run between two steps, with one snapshot and one restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.flow import Actor, Flow, Rollout
from megarl.role_names import actor_suffix
from megarl.trainer.actor_state import ActorState
from megarl.trainer.preflight import Inputs


class TrainState:
    """The number of completed steps and the driver's state of each actor. Only this class counts steps.

    Args:
        config: the configuration of the job.
        inputs: suffix of each actor -> its data; see `read_inputs`.
    """

    def __init__(self, config: TrainConfig, inputs: Mapping[str, Inputs]) -> None:
        self.completed = 0
        """The last completed step: updated, new weights in the engines, recorded."""
        self.in_step = False
        """Whether a step has begun and is not completed."""
        self.actors = {
            suffix: ActorState(suffix, of_actor, inputs[suffix])
            for suffix, of_actor in configs_of_actors(config).items()
        }
        """State of each actor by suffix: "" is the first actor, "_2" the second."""
        self._before_step = self._snapshots()

    @property
    def weight_of(self) -> dict[str, float]:
        """Weight of each scoring role's score in the reward, of all actors."""
        return {role: weight for one in self.actors.values() for role, weight in one.weight_of.items()}

    @property
    def first(self) -> ActorState:
        """State of the first actor, whose role is named "actor"."""
        return self.actors[""]

    @property
    def step(self) -> int:
        """Number of the running step; between two steps the last completed one, 0 before the first."""
        return self.completed + self.in_step

    def actor_of(self, role: str) -> ActorState:
        """Return the state of the actor that a role belongs to: critic_2 belongs to actor_2."""
        return self.actors[actor_suffix(role, {f"actor{suffix}" for suffix in self.actors})]

    def actor(self, name: str) -> ActorState:
        """Return the state of an actor by name. Raises: ValueError if there is no such actor."""
        names = {actor.actor: actor for actor in self.actors.values()}
        if name not in names:
            raise ValueError(f"actor ({name}) must be one of {', '.join(names)}.")
        return names[name]

    @property
    def _shares_episodes(self) -> bool:
        """Whether all actors play in the same episodes, and so take the same rows in the same order."""
        return self.first.config.episodes.share_episodes

    def give_rows(self, rows: Sequence[int], name: str) -> None:
        """Let an actor answer these rows before others, and with it all actors that play in the same episodes.

        Raises: ValueError if there is no such actor, and for rows that do not exist."""
        named = self.actor(name)
        for actor in self.actors.values() if self._shares_episodes else (named,):
            actor.give_rows(rows)

    def rows_of_actors(
        self, flow: Flow, rows: Sequence[int] | Mapping[str, Sequence[int]] | None
    ) -> dict[str, Sequence[int] | None]:
        """Return suffix of each sampling actor -> the data rows to sample responses to; None takes the next
        rows.

        Args:
            rows: rows for all sampling actors, or name of an actor -> its rows."""
        given: dict[str, Sequence[int] | None]
        if isinstance(rows, Mapping):
            given = {self.actor(name).suffix: list(of_actor) for name, of_actor in rows.items()}
        else:
            given = {suffix: rows for suffix in self.actors}
        admitting = (Rollout.generate, Actor.receive_rows)
        suffixes = [node.index for node in flow.nodes if node.declaration() in admitting]
        found = {suffix: given.get(suffix) for suffix in suffixes if suffix in self.actors}
        if isinstance(rows, Mapping) and (silent := [suffix for suffix in given if suffix not in found]):
            raise ValueError(f"rows: actor{silent[0]} samples nothing in this flow. Leave its rows out.")
        if self._shares_episodes and any(rows != [*found.values()][0] for rows in found.values()):
            raise ValueError(
                "rows: with --share-episodes all actors play in the episodes of the same rows. Give one list."
            )
        return found

    def begin_step(self) -> None:
        """Begin the next step, and remember the state of the actors, to which `drop_step` can return."""
        self._before_step = self._snapshots()
        self.in_step = True

    def check_left_out(self) -> None:
        """Raise ValueError if the running step may not end without an update: with --staleness the samples in
        the buffer would become too old."""
        if staleness := self.first.config.streaming.staleness:
            raise ValueError(
                f"step {self.step} has ended without an update. With --staleness {staleness} every step "
                "trains on samples of earlier ones, or these become too old. Call "
                "trainer.update(trainer.rollout()) in each step, or leave the loop. To learn nothing from a "
                "sample, set its reward in batch.rewards to None."
            )

    def complete_step(self) -> None:
        """Count the running step as completed."""
        self.completed, self.in_step = self.step, False

    def drop_step(self) -> None:
        """Return to the state after the last completed step, if a step is running."""
        if self.in_step:
            self.in_step = False
            self._restore_actors(self._before_step)

    def snapshot(self) -> dict[str, Any]:
        """Return the number of completed steps and the state of the actors, as values that JSON can
        represent."""
        return {"step": self.completed, "actors": self._snapshots()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the state that `snapshot` returned, or raise ValueError if the size of the training data
        has changed."""
        self.completed, self.in_step = snapshot["step"], False
        self._restore_actors(snapshot["actors"])

    def _snapshots(self) -> dict[str, dict[str, Any]]:
        return {suffix: actor.snapshot() for suffix, actor in self.actors.items()}

    def _restore_actors(self, snapshots: Mapping[str, Mapping[str, Any]]) -> None:
        for suffix, actor in self.actors.items():
            actor.restore(snapshots[suffix])

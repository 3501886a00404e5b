"""Hold the batches of one training step, one per actor, and assign a batch to each role."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.flow import Flow
from megarl.role_names import kind_and_suffix
from megarl.trainer.actor_state import ActorState
from megarl.trainer.rollout_batch import RolloutBatch


class StepBatches:
    """The RolloutBatch of each actor in the running step: ids, lengths, scores and rewards, without tokens.

    Args:
        step: the number of the step.
        flow: the dependencies of this step.
        actors: suffix -> state of each actor.
    """

    def __init__(self, step: int, flow: Flow, actors: Mapping[str, ActorState]) -> None:
        self.step, self.flow = step, flow
        self.of_actor = {
            suffix: RolloutBatch(step, {}, kl_coef=actor.kl.coef) for suffix, actor in actors.items()
        }
        for batch in self.of_actor.values():
            batch.actors = {actor.actor: self.of_actor[suffix] for suffix, actor in actors.items()}

    @property
    def first(self) -> RolloutBatch:
        """Batch of the first actor, whose role is named "actor"."""
        return self.of_actor[""]

    def batch_of(self, role: str) -> RolloutBatch:
        """Return the batch whose samples a role works on.

        This is the role's own actor's batch if that actor samples, else the first actor's."""
        return self.of_actor.get(self.flow.rollout_source(role), self.first)

    def is_on_policy(self, role: str) -> bool:
        """Return True if the engines of a role's own actor made the samples that the role works on, False if
        another actor's engines did."""
        suffix = kind_and_suffix(role)[1]
        return self.flow.rollout_source(role) == (suffix if suffix in self.of_actor else "")

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens of the samples of all batches that are trained on."""
        return sum(sample.length for batch in self.of_actor.values() for sample in batch.trained_samples)

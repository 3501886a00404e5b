"""Implement the reference on one rank: a frozen copy of the initial policy."""

from __future__ import annotations

from megarl.flow.job_roles import Reference
from megarl.reshard.hf_weights import save_hf
from megarl.workers.actor import ActorRole
from megarl.workers.implements import implements
from megarl.workers.offload_manager import needs
from megarl.workers.policy import PolicyRole


@implements(Reference)
class ReferenceRole(PolicyRole):
    """A policy that keeps the initial weights of the training."""

    @needs("parameters")
    def log_probs(self) -> dict[str, float]:
        """Write the column ref_log_probs. Returns metrics of the memory."""
        self.write_log_probs("ref_log_probs")
        return self.memory_metrics()


@implements(Reference)
class AdapterlessReferenceRole:
    """The reference of an actor that trains adapters on the same ranks.

    The reference is the actor's model with the adapters switched off, and has no separate weights."""

    def __init__(self, actor: ActorRole) -> None:
        self.actor, self.offload_manager = actor, actor.offload_manager

    def setup(self) -> None:
        """Do nothing: the actor has set up the model."""

    @needs("parameters", of="actor")
    def log_probs(self) -> dict[str, float]:
        """Write the column ref_log_probs."""
        with self.actor.model.adapters.off():
            self.actor.write_log_probs("ref_log_probs")
        return {}

    @needs("parameters", of="actor")
    def export_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder. Collective over the mesh."""
        actor = self.actor
        save_hf(folder, actor.folder, actor.shape, actor.atlases, actor.model.parameters)

"""Implement the reference on one rank: a frozen copy of the initial policy, or another model."""

from __future__ import annotations

from functools import cached_property

from megarl.config.hf_config import ModelShape
from megarl.flow.job_roles import Reference
from megarl.reshard.hf_weights import load_hf, save_hf
from megarl.workers.actor import ActorRole
from megarl.workers.implements import implements
from megarl.workers.offload_manager import needs
from megarl.workers.policy import PolicyRole


@implements(Reference)
class ReferenceRole(PolicyRole):
    """A frozen policy on one rank, with the weights that training started from, those of --reference-model, or
    with --reference-update-interval those that the actor had not long ago."""

    folder = property(lambda self: self.config.model.reference_folder)

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.load(self.folder)

    @needs("parameters")
    def take_weights(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder, which the actor has written. Collective over the mesh."""
        load_hf(folder, self.atlases[self.rank], self.model.parameters, self.shape)
        self.model.parameters_changed()

    @needs("parameters")
    def log_probs(self) -> dict[str, float]:
        """Write the column ref_log_probs for this rank's samples. Returns metrics of offloading, which may be
        {}."""
        self.write_log_probs("ref_log_probs")
        return self.memory_metrics()


@implements(Reference)
class AdapterlessReferenceRole:
    """The reference of an actor that trains LoRA adapters: the actor's model with its adapters switched off,
    without separate weights."""

    def __init__(self, actor: ActorRole) -> None:
        self.actor, self.offload_manager = actor, actor.offload_manager

    def setup(self) -> None:
        """Do nothing: the actor has set up the model."""

    @needs("parameters", of="actor")
    def log_probs(self) -> dict[str, float]:
        """Write the column ref_log_probs for this rank's samples, with the adapters switched off. Returns
        {}."""
        with self.actor.model.adapters.off():
            self.actor.write_log_probs("ref_log_probs")
        return {}

    @needs("parameters", of="actor")
    def export_hf(self, folder: str) -> None:
        """Write the weights without adapters into `folder` as a Hugging Face checkpoint. Collective over the
        mesh."""
        actor = self.actor
        save_hf(folder, actor.folder, actor.shape, actor.atlases, actor.model.parameters)

"""Implement the reference on one rank: a frozen copy of the initial policy, or another model.

With --precompute-ref-log-probs the reference scores all rows before training and stores the log-probs in
files. While the policy trains, it reads them and has no model."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from megarl.config.hf_config import ModelShape
from megarl.config.teachers import teacher_folders, teachers_of
from megarl.flow.job_roles import Reference
from megarl.reshard.hf_weights import load_hf, save_hf
from megarl.workers.actor import ActorRole
from megarl.workers.implements import implements
from megarl.workers.offload_manager import OffloadManager, needs
from megarl.workers.policy import PolicyRole
from megarl.workers.stored_log_probs import StoredLogProbs
from megarl.workers.teaching import TeacherPasses, teachers_in


def store_missing(policy: PolicyRole, stored: StoredLogProbs) -> None:
    """Let a policy score this rank's samples, and write a file with the values, unless all ranks have the
    values of theirs. Collective over the mesh."""
    model, batch = policy.model, policy.shard.batch
    lacks = torch.tensor(float(stored.lacks(batch)), device=model.device)
    dist.all_reduce(lacks, dist.ReduceOp.MAX, group=model.groups.intra_dist_opt)
    if lacks.item():
        policy.write_log_probs("ref_log_probs")
        if model.reports:
            stored.write(batch, batch.ref_log_probs[batch.response_mask])


@implements(Reference)
class ReferenceRole(PolicyRole):
    """A frozen policy on one rank, with the weights that training started from, those of --reference-model,
    or with --reference-update-interval those that the actor had not long ago."""

    folder = property(lambda self: self.config.model.reference_folder)
    stored: StoredLogProbs | None = None
    """Log-probs of all rows, in place of the model."""

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.load(self.folder)

    @cached_property
    def teacher(self) -> TeacherPasses:
        """Passes for a policy that learns from whole distributions, or from several teachers."""
        return TeacherPasses(self, self.others)

    @cached_property
    def others(self) -> dict[str, dict[ReferenceRole, float]]:
        """Data source -> its own teachers, on the same mesh, with their weights. They stay on the device."""
        shared = self.name, self.config, self.meshes, self.store
        of_folder = {
            folder: OtherTeacher(*shared, OffloadManager()) for folder in teacher_folders(self.algorithm)
        }
        for folder, teacher in of_folder.items():
            teacher.other_folder = folder
        return {
            source: {of_folder[folder]: weight for folder, weight in weights.items()}
            for source, weights in teachers_of(self.algorithm).items()
        }

    @needs()
    def setup(self) -> None:
        """Build the frozen model, and read the hints of a teacher. Collective over the mesh."""
        super().setup()
        for teacher in teachers_in(self.others):
            teacher.setup()
        if self.algorithm.teacher_column or self.others:
            _ = self.teacher

    @needs("parameters")
    def hidden_states(self, rows: Mapping[int, int]) -> None:
        """Write the column teacher_hidden for this rank's samples. `rows`: sample id -> row of the data."""
        self.teacher.write_hidden_states(rows)

    @needs("parameters")
    def top_tokens(self, rows: Mapping[int, int]) -> None:
        """Write the column teacher_top_k for this rank's samples. `rows`: sample id -> row of the data."""
        self.teacher.write_top_tokens(rows)

    @needs("parameters")
    def take_weights(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder, which the actor has written. Collective over the
        mesh."""
        load_hf(folder, self.atlases[self.rank], self.model.parameters, self.shape)
        self.model.parameters_changed()

    @needs("parameters")
    def store_log_probs(self, folder: str) -> None:
        """Score this rank's samples of rows of the data into a file of the folder, unless the folder has
        their log-probs. Collective over the mesh."""
        if self.stored is None:
            self.stored = StoredLogProbs(Path(folder))
        store_missing(self, self.stored)

    def use_stored_log_probs(self, folder: str) -> None:
        """Read the log-probs of all rows, and free the model if there is one."""
        self.stored = StoredLogProbs(Path(folder))
        self.offload_manager.remove(self.name)
        self.__dict__.pop("model", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @needs("parameters")
    def log_probs(self, rows: Mapping[int, int] | None = None) -> dict[str, float]:
        """Write the column ref_log_probs for this rank's samples, by the teacher of each row if there are
        several. Returns metrics of offloading, which may be {}.

        Raises: ValueError if there are several, and no rows are given."""
        if rows is None and teacher_folders(self.algorithm):
            raise ValueError(
                "log_probs: the job has --teachers, and the rows of the samples say which of them teaches. Pass "
                "batch.row_of."
            )
        if rows is not None:
            self.teacher.write_log_probs(rows)
            return self.memory_metrics()
        if self.stored is not None:
            self.write_stored("ref_log_probs", self.stored)
            return {}
        self.write_log_probs("ref_log_probs")
        return self.memory_metrics()


class OtherTeacher(ReferenceRole):
    """A further teacher beside the reference, with a model of its own."""

    other_folder: str
    """Hugging Face folder of the model."""
    folder = property(lambda self: self.other_folder)
    others: Mapping[str, ReferenceRole] = MappingProxyType({})


@implements(Reference)
class AdapterlessReferenceRole:
    """The reference of an actor that trains LoRA adapters: the actor's model with its adapters switched off,
    without separate weights."""

    stored: StoredLogProbs | None = None
    """Log-probs of all rows, in place of passes without adapters."""

    def __init__(self, actor: ActorRole) -> None:
        self.actor, self.offload_manager = actor, actor.offload_manager

    @cached_property
    def teacher(self) -> TeacherPasses:
        """Passes without adapters, for a policy that learns from whole distributions."""
        return TeacherPasses(self.actor)

    def setup(self) -> None:
        """Read the hints of a teacher: the actor has set up the model."""
        if self.actor.algorithm.teacher_column:
            _ = self.teacher

    @needs("parameters", of="actor")
    def hidden_states(self, rows: Mapping[int, int]) -> None:
        """Write the column teacher_hidden, as `ReferenceRole.hidden_states` does."""
        with self.actor.model.adapters.off():
            self.teacher.write_hidden_states(rows)

    @needs("parameters", of="actor")
    def top_tokens(self, rows: Mapping[int, int]) -> None:
        """Write the column teacher_top_k, as `ReferenceRole.top_tokens` does."""
        with self.actor.model.adapters.off():
            self.teacher.write_top_tokens(rows)

    @needs("parameters", of="actor")
    def store_log_probs(self, folder: str) -> None:
        """Score this rank's samples with the adapters switched off, as `ReferenceRole.store_log_probs`
        does."""
        if self.stored is None:
            self.stored = StoredLogProbs(Path(folder))
        with self.actor.model.adapters.off():
            store_missing(self.actor, self.stored)

    def use_stored_log_probs(self, folder: str) -> None:
        """Read the log-probs of all rows."""
        self.stored = StoredLogProbs(Path(folder))

    @needs("parameters", of="actor")
    def log_probs(self, rows: Mapping[int, int] | None = None) -> dict[str, float]:
        """Write the column ref_log_probs for this rank's samples, with the adapters switched off. Returns
        {}."""
        if self.stored is not None:
            self.actor.write_stored("ref_log_probs", self.stored)
            return {}
        with self.actor.model.adapters.off():
            self.actor.write_log_probs("ref_log_probs")
        return {}

    @needs("parameters", of="actor")
    def export_hf(self, folder: str) -> None:
        """Write the weights without adapters into `folder` as a Hugging Face checkpoint. Collective over the
        mesh."""
        actor = self.actor
        tokenizer = actor.config.model.tokenizer_model
        save_hf(folder, actor.folder, actor.shape, actor.atlases, actor.model.parameters, tokenizer=tokenizer)

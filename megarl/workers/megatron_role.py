"""What every role with a Megatron model has on one rank: the model, its weights, and its share of the
step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.batch import MicroBatch
from megarl.checkpoint.manifest import CheckpointError
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, parallel_of, share_keys
from megarl.config.schema import LoRAConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megarl.batch_invariants import check_column
from megarl.flow import FlowError
from megarl.flow.role import writer_of
from megarl.invariants import InvariantError
from megarl.packing import MiniBatch
from megarl.reshard import megatron_atlas
from megarl.reshard.atlas import Atlas
from megarl.reshard.lora_atlas import adapter_sizes, with_adapters
from megarl.reshard.peft import save_peft
from megarl.reshard.transfer import load_hf, save_hf
from megarl.role_names import actor_suffix
from megarl.workers.checkpoint_writer import CheckpointWriter
from megarl.workers.data_plane import DataPlane, Share
from megarl.runtime.process import peak_rss_bytes
from megarl.workers.residence import needs
from megarl.workers.updates import Updates

if TYPE_CHECKING:
    from megarl.megatron.loss_check import LossCheck
    from megarl.megatron.trained_model import TrainedModel


def megatron_atlases(shape: ModelShape, mesh: MeshSpec, parallel: ParallelConfig) -> dict[int, Atlas]:
    """What each rank of the mesh holds."""
    from megarl.megatron.transformer_engine import uses_transformer_engine

    return megatron_atlas.megatron_atlases(
        shape, mesh, uses_transformer_engine(), qkv_layout=parallel.qkv_layout
    )


class MegatronRole:
    """A Megatron model on this rank. Subclasses say which, and what it computes.

    Args:
        name: of the role; its mesh is meshes[name].
        config: of the role's actor.
        folder: Hugging Face folder with the weights that it starts from.
        shape: of that model.
        optimizer: None: frozen.
        lora: of its adapters, if it has some."""

    model: TrainedModel
    writer: CheckpointWriter
    """Of a role that is trained."""

    def __init__(
        self,
        name: str,
        config: TrainConfig,
        folder: str,
        shape: ModelShape,
        meshes: Mapping[str, MeshSpec],
        plane: DataPlane,
        optimizer: OptimizerConfig | None,
        lora: LoRAConfig | None = None,
    ) -> None:
        self.lora = lora if lora and lora.lora_rank else None
        self.name, self.config, self.folder, self.shape, self.plane, self.optimizer = (
            name,
            config,
            folder,
            shape,
            plane,
            optimizer,
        )
        self.mesh, self.share_key, self.suffix = (
            meshes[name],
            share_keys(meshes)[name],
            actor_suffix(name, meshes),
        )
        self.parallel = parallel_of(config, name)
        self.rank, self.updates = dist.get_rank(), Updates(name, config.run.on_nonfinite)
        self.has_failed_samples = False
        """Whether the loss of this step's updates has to leave tokens out."""
        self.own_columns: dict[str, tuple[Share, torch.Tensor | None]] = {}
        """What this role has written since its last update, and for which share."""

    def build(self) -> TrainedModel:
        """The model, weights undefined."""
        raise NotImplementedError

    @needs()
    def setup(self) -> None:
        """Build the model and load its weights. Collective over the mesh."""
        from megarl.megatron.initialize import initial_adapters, random_weights

        self.model = self.build()
        self.atlases = megatron_atlases(self.shape, self.mesh, self.parallel)
        atlas = self.atlases[self.rank]
        if self.config.model.random_init:
            random_weights(self.shape, atlas, self.model.parameters, self.config.batch.seed)
        else:
            load_hf(self.folder, atlas, self.model.parameters, self.shape)
        if self.lora is not None:
            self.atlases = {rank: with_adapters(atlas, self.lora) for rank, atlas in self.atlases.items()}
            initial_adapters(
                self.atlases[self.rank],
                adapter_sizes(self.shape, self.lora),
                self.model.parameters,
                self.config.batch.seed,
            )
        self.model.parameters_changed()
        self.model.memory.owner = self.name
        self.plane.residence.add(self.name, self.model.memory, self.parallel.offload)

    @property
    def share(self) -> Share:
        return self.plane.shares[self.share_key]

    def micro_batches(self, mini_batches: list[MiniBatch]) -> list[MicroBatch]:
        """This rank's forward passes over the mini-batches, from the step's batch.

        Raises: InvariantError if a sample no longer has the tokens or values written for it."""
        share, dp_rank = self.share, self.model.groups.dp.rank()
        return [share.micro_batch(ids) for m in mini_batches for ids in m.micro_batches[dp_rank]]

    def write_column(
        self, name: str, per_micro_batch: list[torch.Tensor] | None, largest: float = math.inf
    ) -> None:
        """Make the response tokens' values, in the order of the share's micro-batches, a column of the step;
        None, as before the last pipeline stage, writes nothing. Raises InvariantError if one is not finite or
        above `largest`."""
        if per_micro_batch is not None:
            share = self.share
            batch = share.batch
            share.set_column(name, batch.scatter(torch.cat(per_micro_batch)))
            check_column(batch, name, largest)
        self.own_columns[name] = self.share, getattr(self.share.batch, name)

    def require_columns(self, method: str, columns: Iterable[str]) -> None:
        """Raise FlowError for a column that a method needs and that no call of this step has written."""
        if not self.model.is_last_stage:  # there are no columns before
            return
        missing = [column for column in columns if getattr(self.share.batch, column) is None]
        if missing:
            column, writer = missing[0], writer_of(missing[0], self.suffix)
            source = writer.split(".")[0]
            bring = (
                f', then trainer.exchange(["{column}"], "{source}", "{self.name}") if they are on other ranks'
            )
            text = (
                f"{self.name}.{method} reads {column}, which this rank does not have. Call "
                f"roles.{writer}() before it"
            )
            raise FlowError([f"{text}{'' if source == self.name else bring}."])

    def has_own(self, name: str) -> bool:
        """Whether the column is what this role itself wrote, with the weights that it still has. On every
        stage of a pipeline alike."""
        share, column = self.own_columns.get(name, (None, None))
        return share is self.share and column is getattr(share.batch, name)

    def update_over_epochs(
        self, update: Callable[[MiniBatch, LossCheck | None], dict[str, float]], target: str
    ) -> dict[str, float]:
        """All optimizer updates of the step. Returns and raises as `Updates.over_epochs`.

        Args:
            update: with a check, the first one of the step.
            target: column of what the loss learns from. It is NaN on the tokens of a sample whose reward
                failed."""
        self.model.advance_schedule()
        has_rewards = self.config.algorithm.needs_rollout
        mini_batches = self.scored_mini_batches(target) if has_rewards else self.share.mini_batches
        is_first = True

        def checked(mini_batch: MiniBatch) -> dict[str, float]:
            nonlocal is_first
            metrics = update(mini_batch, self.loss_check(mini_batch) if is_first else None)
            is_first = False  # not before: an update that was left out has changed no weight
            return metrics

        try:
            return self.updates.over_epochs(self.model, mini_batches, self.config.batch.num_epochs, checked)
        finally:
            self.own_columns.clear()

    def loss_check(self, mini_batch: MiniBatch) -> LossCheck:
        """What the first update of a step is held against."""
        raise NotImplementedError

    def scored_mini_batches(self, target: str) -> list[MiniBatch]:
        """The step's mini-batches with the counts of the samples that have a reward: the denominators of the
        loss. Collective over the mesh.

        Raises: InvariantError if the ranks hold another number of tokens than was planned."""
        mini_batches, batch = self.share.mini_batches, self.share.batch
        # Of each: response tokens, those with a target, samples with a target.
        counts = torch.zeros(len(mini_batches), 3, dtype=torch.int64)
        if self.model.reports:
            column = getattr(batch, target)
            scored = batch.response_mask if column is None else batch.response_mask & ~column.isnan()
            of_sample = batch.tokens_per_sample(scored)
            rows = torch.stack([batch.response_lengths, of_sample, of_sample > 0], 1)
            dp_rank = self.model.groups.dp.rank()
            for index, part in enumerate(rows.split([len(m.samples_of(dp_rank)) for m in mini_batches])):
                counts[index] = part.sum(0)
        counts = counts.to(self.model.device)
        dist.all_reduce(counts, group=self.model.groups.intra_dist_opt)
        amended = []
        for mini_batch, (held, num_tokens, num_sequences) in zip(mini_batches, counts.tolist(), strict=True):
            if held != mini_batch.num_tokens:
                raise InvariantError(
                    f"{self.name}: the ranks hold {held} response tokens of mini-batch {len(amended)}, "
                    f"and it was planned with {mini_batch.num_tokens}"
                )
            amended.append(replace(mini_batch, num_tokens=num_tokens, num_sequences=num_sequences))
        self.has_failed_samples = amended != list(mini_batches)
        return amended

    def memory_metrics(self) -> dict[str, float]:
        """This rank's share, see `Residence.take_metrics`; the time from the mesh's first rank alone."""
        return self.plane.residence.take_metrics(self.name, with_time=self.rank == self.mesh.ranks[0])

    @needs("parameters")
    def export_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder; adapters are merged into them, and in <folder>_adapter
        by themselves, in PEFT's format. Collective over the mesh."""
        self.model.merge_adapters()
        save_hf(folder, self.folder, self.shape, self.atlases, self.model.weights)
        if self.lora is not None:
            save_peft(
                f"{folder}_adapter", self.folder, self.shape, self.atlases, self.model.parameters, self.lora
            )

    @needs("parameters", "optimizer")
    def save_checkpoint(self, folder: str, state: dict[str, object] | None = None) -> None:
        """Write the model, its optimizer and its schedule, and what else to remember (for JSON). Collective
        over the mesh.

        Raises: CheckpointError, on every rank, if `folder` exists or cannot be written; it is then not
        there."""
        from megarl.megatron.training_state import save_checkpoint

        save_checkpoint(folder, self.model, self.atlases[self.rank], state)

    @needs("parameters", "optimizer")
    def begin_checkpoint(self, folder: str) -> None:
        """As `save_checkpoint`, but only copies; a thread writes while training goes on, and `written` says
        when it has. Collective."""
        self.writer.begin(
            Path(folder),
            self.model,
            self.atlases[self.rank],
            {"skipped_in_a_row": self.updates.skipped_in_a_row},
        )

    def checkpoint_written(self, wait: bool = False) -> str | None:
        """SHA-256 of the manifest of the checkpoint that was begun; None: it is not complete yet. Raises:
        CheckpointError if a rank failed."""
        return self.writer.written(wait)

    @needs("parameters", "optimizer")
    def damage_of_checkpoint(self, folder: str) -> str | None:
        """Why `load_checkpoint` would fail, the same on every rank; None: it is whole and of this model.
        Collective over the mesh."""
        from megarl.megatron.training_state import verify_checkpoint

        try:
            verify_checkpoint(folder, self.model, self.atlases[self.rank])
        except CheckpointError as error:
            return str(error)
        return None

    @needs("parameters", "optimizer")
    def load_checkpoint(
        self, folder: str, weights_only: bool = False, digests: bool = True
    ) -> dict[str, object]:
        """Continue from a checkpoint of any layout, or take its weights only. Collective over the mesh. After
        `setup`. digests: False if `damage_of_checkpoint` has just found none.

        Returns: the state that was saved with it.
        Raises: CheckpointError, on every rank, naming what is damaged or does not fit; the model is then as
        it was."""
        from megarl.megatron.training_state import load_checkpoint

        state = load_checkpoint(folder, self.model, self.atlases[self.rank], weights_only, digests=digests)
        self.updates.skipped_in_a_row = state.get("skipped_in_a_row", 0)
        return state


def with_target(
    columns: Mapping[str, torch.Tensor | None], target: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """The rows of [N] columns at which `target` is a number: the tokens of samples that have a reward."""
    rows = (~target.isnan()).nonzero()[:, 0]
    return {name: None if column is None else column[rows] for name, column in columns.items()}


def peak_memory_bytes() -> int:
    """Most memory this process has held: on the GPU if there is one, else resident."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_rss_bytes()

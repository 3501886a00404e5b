"""Define the base class of all roles with a Megatron model: model, weights, batch shard and updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.algorithms.base import Algorithm, LossInputs, ValueLossInputs
from megarl.algorithms.promised_weight import promised_weight
from megarl.batch import MicroBatch, column_dtype
from megarl.checkpoint.manifest import CheckpointError, CheckpointIOError
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, parallel_of
from megarl.config.schema import LoRAConfig, OptimizerConfig, ParallelConfig
from megarl.data.tokenizer import complete_export
from megarl.batch_invariants import check_column
from megarl.flow import FlowError
from megarl.flow.role import writer_of
from megarl.invariants import InvariantError
from megarl.packing import MiniBatch
from megarl.reshard import megatron_atlas
from megarl.reshard.atlas import Atlas
from megarl.reshard.lora_atlas import adapter_sizes, with_adapters
from megarl.reshard.peft import save_peft
from megarl.reshard.hf_weights import load_hf, save_hf
from megarl.runtime.process import peak_rss_bytes
from megarl.workers.checkpoint_writer import CheckpointWriter
from megarl.workers.hosted_role import HostedRole
from megarl.workers.objective import Objective
from megarl.workers.offload_manager import needs
from megarl.workers.store import BatchLayout, BatchShard
from megarl.workers.updates import Updates

if TYPE_CHECKING:
    from megarl.megatron.loss_check import LossCheck, PassLimit
    from megarl.megatron.trained_model import TrainedModel


def megatron_atlases(shape: ModelShape, mesh: MeshSpec, parallel: ParallelConfig) -> dict[int, Atlas]:
    """Return rank -> its atlas: which rows and columns of which Hugging Face tensors the rank's parameters
    hold."""
    from megarl.megatron.transformer_engine import uses_transformer_engine

    return megatron_atlas.megatron_atlases(
        shape, mesh, uses_transformer_engine(), qkv_layout=parallel.qkv_layout
    )


class MegatronRole(HostedRole):
    """One rank's part of a role with a Megatron model. Subclasses build the model and define its
    computations."""

    model: TrainedModel
    writer: CheckpointWriter
    """Writer of the role's checkpoints; only a trained role has one."""
    objective: Objective
    """Loss of the role and its inputs; only a trained role has one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parallel = parallel_of(self.config, self.name)
        self.updates = Updates(self.name, self.config.run.on_nonfinite)
        adapters = self.adapter_options
        self.lora = adapters if adapters and adapters.lora_rank else None
        self.has_failed_samples = False
        """Whether the loss of this step's updates must exclude tokens of failed samples."""
        self.own_columns: dict[str, tuple[BatchShard, torch.Tensor | None]] = {}
        """Columns that this role has written since its last update, with their batch shard."""

    @property
    def folder(self) -> str:
        """Hugging Face checkpoint folder that the initial weights are read from."""
        return self.config.model.model

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """Options of the optimizer; None if the model is frozen."""
        return None

    @property
    def adapter_options(self) -> LoRAConfig | None:
        """LoRA options of the role; None if the role never has adapters."""
        return None

    @property
    def algorithm(self) -> Algorithm:
        return self.config.algorithm

    def build(self) -> TrainedModel:
        """Return the Megatron model of this rank, with weights that are not loaded yet."""
        raise NotImplementedError

    def build_as(self, model: Callable[..., TrainedModel]) -> TrainedModel:
        """Return a model of this class with the role's sizes, mesh and configuration, and with weights that
        are not loaded yet."""
        config = self.config
        return model(
            self.shape,
            self.mesh,
            config.model,
            self.parallel,
            self.optimizer,
            config.batch.train_iters,
            config.transformer,
            config.experts,
            self.lora,
        )

    @needs()
    def setup(self) -> None:
        """Build the model, load its weights, or draw them with --random-init, and add new LoRA adapters.
        Collective over the mesh."""
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
        self.offload_manager.add(self.name, self.model.memory, self.parallel.offload)

    @property
    def shard(self) -> BatchShard:
        """This rank's part of the training batch: its samples, their columns and the plan of mini-batches.

        Raises: MissingSampleError if some of its samples were released."""
        return self.store.batch(self.shard_key)

    @property
    def layout(self) -> BatchLayout:
        """Records of all samples of the step, and the rank of each."""
        return self.store.layouts[self.shard_key]

    def micro_batches(
        self, mini_batches: list[MiniBatch], shard: BatchShard | None = None
    ) -> list[MicroBatch]:
        """Return the micro-batches of this rank in these mini-batches, in order: one per forward pass.

        Args:
            shard: the batch shard with their samples. Default: the shard that the role trains on.
        Raises: InvariantError if a sample no longer has the tokens or values written for it."""
        shard = self.shard if shard is None else shard
        dp_rank = self.model.groups.dp.rank()
        return [shard.micro_batch(ids) for m in mini_batches for ids in m.micro_batches[dp_rank]]

    def write_column(
        self, name: str, per_micro_batch: list[torch.Tensor] | None, largest: float = math.inf
    ) -> None:
        """Store a token column, given the values of the response tokens of each micro-batch. Raises
        InvariantError if a value is not finite or above `largest`.

        None, as before the last pipeline stage, writes nothing.

        Raises: InvariantError if a value is not finite or above `largest`."""
        shard = self.shard
        if per_micro_batch is not None:
            shard.set_column(name, shard.batch.scatter(torch.cat(per_micro_batch), column_dtype(name)))
            check_column(shard.batch, name, largest)
        self.own_columns[name] = shard, getattr(shard.batch, name)

    def require_columns(self, method: str, columns: Iterable[str]) -> None:
        """Raise FlowError if a column that a method reads has not been computed in this step, and name the
        call that computes it."""
        if not self.model.is_last_stage:  # earlier stages have no columns
            return
        batch = self.shard.batch
        missing = [column for column in columns if getattr(batch, column) is None]
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
        """Return whether this role itself wrote the column in this step, before its first update.

        The result is the same on every pipeline stage."""
        shard, column = self.own_columns.get(name, (None, None))
        return shard is self.shard and column is getattr(shard.batch, name)

    def update_over_epochs(
        self,
        update: Callable[[MiniBatch, LossCheck | None], dict[str, float]],
        is_enough: Callable[[dict[str, float]], bool] | None = None,
    ) -> dict[str, float]:
        """Make all optimizer updates of the step, and return this rank's mean metrics. Raises NonFiniteUpdate
        as --on-nonfinite says.

        Args:
            update: makes one update. The first update of the step gets a check.
            is_enough: see `Updates.over_epochs`."""
        self.model.advance_schedule()
        has_rewards = self.algorithm.needs_rollout
        mini_batches = self.scored_mini_batches() if has_rewards else self.shard.mini_batches
        is_first = True

        def checked(mini_batch: MiniBatch) -> dict[str, float]:
            nonlocal is_first
            metrics = update(mini_batch, self.loss_check(mini_batch) if is_first else None)
            is_first = False  # after the update, because a skipped update has changed no weight
            return metrics

        try:
            epochs = self.config.batch.num_epochs
            return self.updates.over_epochs(self.model, mini_batches, epochs, checked, is_enough)
        finally:
            self.own_columns.clear()

    def loss_check(self, mini_batch: MiniBatch) -> LossCheck:
        """Return the object that checks token weights and log-probs (a critic: values) in the first update of
        a step."""
        from megarl.megatron.loss_check import LossCheck

        counts = mini_batch.num_tokens, mini_batch.num_sequences
        longest = self.config.max_sampled_length
        promised = promised_weight(self.algorithm, self.objective.loss, *counts, longest)
        return LossCheck(self.name, self.objective.what, promised, *counts, self.pass_limit())

    def pass_limit(self) -> PassLimit | None:
        """Return how far the first update's outputs may be from those of the pass before it, with equal
        weights; None for no check."""
        raise NotImplementedError

    def loss_of_update(
        self, mini_batch: MiniBatch, check: LossCheck | None, **constants: float
    ) -> Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Return the loss of one update as a function of a micro-batch and of the model's outputs for it.

        Args:
            check: records the inputs of the loss.
            constants: further fields of the inputs of the loss.
        Returns: loss(micro_batch, rows, **outputs), where `rows` are the response tokens of the outputs. It
        returns the result of the algorithm's loss."""
        objective = self.objective

        def loss(micro: MicroBatch, rows: slice, **outputs: torch.Tensor | None):
            device = outputs[objective.output].device
            fields = {name: micro.column(column) for name, column in objective.columns.items()}
            fields["response_lengths"] = self._episode_length_of_token(micro)
            fields["sequence_ids"] = micro.batch.sample_of_token[micro.response_positions]
            if check is not None:
                fields["rows"] = torch.arange(len(micro.response_positions))
            fields = {name: f if f is None else f[rows].to(device) for name, f in fields.items()} | outputs
            if self.has_failed_samples:
                fields = with_target(fields, fields[objective.target])
            rows_of_inputs = fields.pop("rows", None)
            inputs = objective.inputs(
                num_tokens=mini_batch.num_tokens,
                num_sequences=mini_batch.num_sequences,
                max_response_length=self.config.max_sampled_length,
                **constants,
                **fields,
            )
            if check is not None and len(rows_of_inputs):
                self.check_inputs(check, micro, rows_of_inputs, inputs)
            return getattr(self.algorithm, objective.loss)(inputs)

        return loss

    def _episode_length_of_token(self, micro: MicroBatch) -> torch.Tensor:
        """Return [N] int64: for each response token the number of response tokens of its episode."""
        layout = self.store.layouts.get(self.shard_key)
        if layout is None or not layout.has_branches:
            return micro.response_length_of_token
        ids = micro.batch.sample_ids.tolist()
        lengths = torch.tensor([layout.episode_lengths[layout.episode_of[s]] for s in ids], dtype=torch.int64)
        return lengths[micro.batch.sample_of_token[micro.response_positions]]

    def check_inputs(
        self,
        check: LossCheck,
        micro: MicroBatch,
        rows: torch.Tensor,
        inputs: LossInputs | ValueLossInputs,
    ) -> None:
        """Record the inputs of the loss in `check`, which compares token weights and outputs after the
        update.

        Args:
            rows: indices into the micro-batch's response tokens."""
        objective = self.objective
        measure = None if check.promised is None else objective.token_weight
        weight = None if measure is None else measure(self.algorithm, inputs)
        check.add_tokens(inputs.response_lengths, weight)
        if check.compares:
            check.add_passes(
                micro, rows, getattr(inputs, objective.output), getattr(inputs, objective.before)
            )

    def scored_mini_batches(self) -> list[MiniBatch]:
        """Return the step's mini-batches with token and sample counts that leave out samples whose reward
        failed.

        These counts are the denominators of the loss. Collective over the mesh.

        Raises: InvariantError if the ranks hold another number of tokens than planned."""
        mini_batches, batch = self.shard.mini_batches, self.shard.batch
        # Per mini-batch: response tokens, response tokens with a target, episodes with a target.
        counts = torch.zeros(len(mini_batches), 3, dtype=torch.int64)
        if self.model.reports:
            column = getattr(batch, self.objective.target)
            scored = batch.response_mask if column is None else batch.response_mask & ~column.isnan()
            of_sample = batch.tokens_per_sample(scored)
            is_counted = of_sample > 0  # all samples of an episode have a target, or none has
            layout = self.store.layouts.get(self.shard_key)
            if layout is not None and layout.has_branches:
                is_counted &= torch.tensor([layout.episode_of[s] == s for s in batch.sample_ids.tolist()])
            rows = torch.stack([batch.response_lengths, of_sample, is_counted], 1)
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
        """Return this rank's metrics of offloading (memory/*_resident_bytes, time/offload_s); {} in a job
        without offload.

        Only the mesh's first rank reports the time."""
        return self.offload_manager.take_metrics(self.name, with_time=self.rank == self.mesh.ranks[0])

    @needs("parameters")
    def export_hf(self, folder: str) -> None:
        """Write the weights into `folder` as a Hugging Face checkpoint. Collective over the mesh.

        Adapters are merged into the weights, and written alone to <folder>_adapter in PEFT's format."""
        self.model.merge_adapters()
        model, weights = self.config.model, self.model.weights
        save_hf(folder, self.folder, self.shape, self.atlases, weights, model.tokenizer_model, self._complete)
        if self.lora is not None:
            save_peft(
                f"{folder}_adapter", self.folder, self.shape, self.atlases, self.model.parameters, self.lora
            )

    def _complete(self, folder: Path) -> None:
        complete_export(folder, self.config.model, self.shape.value_head)

    @needs("parameters", "optimizer")
    def save_checkpoint(self, folder: str, state: dict[str, object] | None = None) -> None:
        """Write the model, its optimizer, its schedule and `state` to `folder`. Collective over the mesh;
        raises CheckpointError on every rank if one fails.

        Raises: CheckpointError, on every rank, if `folder` exists or cannot be written. No new folder is left
        in that case."""
        from megarl.megatron.training_state import save_checkpoint

        save_checkpoint(folder, self.model, self.atlases[self.rank], state)

    @needs("parameters", "optimizer")
    def begin_checkpoint(self, folder: str) -> None:
        """Copy the model, its optimizer and its schedule to host memory, and return; a thread writes the copy
        to `folder`.

        `checkpoint_written` reports when the checkpoint is complete. Collective over the mesh."""
        self.writer.begin(
            Path(folder),
            self.model,
            self.atlases[self.rank],
            {"skipped_in_a_row": self.updates.skipped_in_a_row},
        )

    def checkpoint_written(self, wait: bool = False) -> str | None:
        """Return the SHA-256 of the manifest once the checkpoint in progress is complete, else None. Raises
        CheckpointError if a rank failed."""
        return self.writer.written(wait)

    @needs("parameters", "optimizer")
    def damage_of_checkpoint(self, folder: str) -> str | None:
        """Return why `load_checkpoint` would fail, the same text on every rank, or None if it would succeed.

        Collective over the mesh.

        Raises: CheckpointIOError, on every rank, if the file system fails: that is no damage."""
        from megarl.megatron.training_state import verify_checkpoint

        try:
            verify_checkpoint(folder, self.model, self.atlases[self.rank])
        except CheckpointIOError:
            raise
        except CheckpointError as error:
            return str(error)
        return None

    @needs("parameters", "optimizer")
    def load_checkpoint(
        self, folder: str, weights_only: bool = False, digests: bool = True
    ) -> dict[str, object]:
        """Load a checkpoint of any parallel layout, or its weights only, and return the `state` that was
        saved with it. Raises CheckpointError on every rank if it cannot be loaded.

        Collective over the mesh. Call this after `setup`.

        Args:
            digests: False if `damage_of_checkpoint` has just found no damage.
        Returns: the state that was saved with the checkpoint.
        Raises: CheckpointError, on every rank, naming the damaged or unsuitable part. The model then stays
        unchanged."""
        from megarl.megatron.training_state import load_checkpoint

        state = load_checkpoint(folder, self.model, self.atlases[self.rank], weights_only, digests=digests)
        self.updates.skipped_in_a_row = state.get("skipped_in_a_row", 0)
        return state


def with_target(
    columns: Mapping[str, torch.Tensor | None], target: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Return only those rows of each [N] column where `target` is not NaN: the tokens of samples that have a
    reward."""
    rows = (~target.isnan()).nonzero()[:, 0]
    return {name: None if column is None else column[rows] for name, column in columns.items()}


def peak_memory_bytes() -> int:
    """Return the peak memory of this process in bytes: on the GPU if there is one, else resident."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_rss_bytes()

"""Base of all models that Megatron trains: this rank's pipeline stage, DDP, optimizer, schedule and passes.

`Policy` and `ValueModel` define the model, the request of a forward pass, and the handling of its output. All
ranks of the mesh call every method, with equally many micro-batches. Outputs and losses exist on the last
pipeline stage. Other stages return None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megarl.batch import MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import LoRAConfig, ModelConfig, MoEConfig, OptimizerConfig, ParallelConfig
from megarl.invariants import NonFiniteUpdate
from megarl.megatron.context_parallel import ContextShard
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.data_parallel import data_parallel
from megarl.megatron.fixes import fix_megatron
from megarl.megatron.fsdp import ShardedDataParallel
from megarl.megatron.gradients import reduction_factors
from megarl.megatron.inner_optimizers import local
from megarl.megatron.loss_check import LossCheck
from megarl.megatron.lora import Adapters
from megarl.megatron.mesh import groups_of
from megarl.megatron.model import build_model
from megarl.megatron.nonfinite import NonFiniteStep, explain
from megarl.megatron.offload import ModelMemory
from megarl.megatron.optimizer import build_optimizer, build_scheduler, prepare_step, take_step
from megarl.megatron.pipeline import run_schedule
from megarl.megatron.routing import Routing
from megarl.megatron.transformer_config import transformer_config
from megarl.metrics import combine
from megarl.ranges import profile_range, profiled

with cpu_megatron():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.fp8_utils import get_fp8_align_size
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams

Metrics = dict[str, torch.Tensor]
Request = Callable[[MicroBatch, ContextShard], Any]
"""Function that builds this rank's request to the last stage, which is passed as GPTModel's `labels`."""


class TrainedModel:
    prefix: ClassVar[str]
    """Prefix of this model's metric names."""
    routing_prefix: ClassVar[str]
    """Prefix of the metric names of its routers, if the model is a mixture of experts."""
    token_values: ClassVar[tuple[str, str]]
    """Name of the compared number, for people, and the batch column with its value before the step."""
    model_class: ClassVar[type[GPTModel]]

    def __init__(
        self,
        shape: ModelShape,
        mesh: MeshSpec,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig | None = None,
        train_iters: int = 1,
        transformer: dict[str, object] | None = None,
        experts: MoEConfig | None = None,
        lora: LoRAConfig | None = None,
    ) -> None:
        """Build the model and its optimizer (None: frozen, forward only).

        All weights, including those of adapters (`lora`), are undefined until they are loaded."""
        _initialize_process()
        self.shape, self.mesh, self.bf16 = shape, mesh, model.bf16
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        with cpu_megatron():
            self.groups = groups_of(mesh)
            self.config = transformer_config(shape, model, parallel, transformer or {})
            if is_sharded := optimizer is not None and optimizer.use_megatron_fsdp:
                # The fused kernel overwrites the gradients of earlier micro-batches (layers.py:677).
                self.config.gradient_accumulation_fusion = False
            self.chunks = build_model(self.model_class, self.config, shape, self.groups, parallel.qkv_layout)
            self.routing = self.adapters = self.optimizer = self.scheduler = None
            self.ddp: list[DistributedDataParallel | ShardedDataParallel] = []
            if shape.is_moe:
                self.routing = Routing(self.chunks, experts or MoEConfig(), self.groups, self.device)
            if lora and lora.lora_rank:
                self.adapters = Adapters(self.chunks, lora, self.config, self.groups.tp)
            if optimizer is not None:
                self.ddp = data_parallel(self.chunks, self.config, optimizer, mesh, self.groups, self.device)
                self.optimizer = build_optimizer(optimizer, self.ddp, self.groups, model.bf16)
                self.scheduler = build_scheduler(optimizer, self.optimizer, train_iters)
            self.sharded: list[ShardedDataParallel] = self.ddp if is_sharded else []
        # The views are taken here because DDP has moved the weights before.
        self._parameters = {name: p.data.view(p.shape[0], -1) for name, p in self._named_weights()}
        self.memory = ModelMemory(self, owner=self.prefix)
        self._losses: list[torch.Tensor] = []
        """Losses of the micro-batches of the latest passes with gradients, on the last stage."""

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The live weights by name, as views [rows, cols]. Vectors are [n, 1].

        The views stay valid. Their addresses change with an offload."""
        self.memory.use("parameters")
        return self._parameters

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights with LoRA adapters merged in, by name, for a sync to the rollout engine or an export.

        Adapted matrices include their adapters, as of the last `merge_adapters`. Without adapters this is
        `parameters` itself."""
        if self.adapters is None:
            return self.parameters
        self._allocate_merged()
        return self.parameters | self.adapters.merged

    def merge_adapters(self) -> None:
        """Merge the current LoRA adapters into the matrices in `weights`, without communication. Without
        adapters, do nothing."""
        if self.adapters is not None:
            self._allocate_merged()
            self.adapters.merge(self.parameters)

    def _allocate_merged(self) -> None:
        """Allocate the merged matrices once, when `weights` is first read."""
        if not self.adapters.merged:
            self.adapters.allocate_merged(self.parameters)
            self.memory.add("parameters", self.adapters.merged.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (name, parameter) under the names of the atlas, this rank's map from parameters to Hugging
        Face tensors.

        If there are several chunks, the names of chunk c begin with `chunks.<c>.`."""
        if self.sharded:
            yield from self.sharded[0].whole_parameters.items()
            return
        for prefix, chunk in self._named_chunks():
            yield from chunk.named_parameters(prefix)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, gradient) of what this rank holds, before the optimizer steps.

        The names are those of `named_parameters`. A rank holds only its part of a sharded gradient."""
        name_of = {parameter: name for name, parameter in self.named_parameters()}
        for ddp in self.sharded:
            yield from (
                (name_of[parameter], local(shard.grad))
                for parameter, _, shard in ddp.optimized()
                if shard.grad is not None
            )
        if not self.sharded:
            yield from (
                (name, p.main_grad)
                for p, name in name_of.items()
                if getattr(p, "main_grad", None) is not None
            )

    def _named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters, and the routers' score corrections, which are buffers in checkpoints too."""
        yield from self.named_parameters()
        for prefix, chunk in self._named_chunks():
            yield from (
                (name, buffer)
                for name, buffer in chunk.named_buffers(prefix)
                if name.endswith("router.expert_bias")
            )

    def _named_chunks(self) -> Iterator[tuple[str, GPTModel]]:
        for number, chunk in enumerate(self.chunks):
            yield f"chunks.{number}" if len(self.chunks) > 1 else "", chunk

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    @property
    def reports(self) -> bool:
        """True on one rank of every data-parallel replica, which reports the metrics of its replica."""
        return self._reports_shard and self.groups.cp.rank() == 0

    @property
    def reports_steps(self) -> bool:
        """True on the one rank of the role that reports the metrics of an optimizer step."""
        return self.reports and self.groups.dp.rank() == 0

    @property
    def _reports_shard(self) -> bool:
        """True on each rank that reports its part of numbers that are split over context-parallel ranks."""
        return self.is_last_stage and self.groups.tp.rank() == 0

    def parameters_changed(self) -> None:
        """Copy `parameters` into the optimizer's fp32 master weights after a direct write; do nothing for a
        frozen model."""
        if self.optimizer is not None:
            self.memory.use("parameters", "optimizer")
            with cpu_megatron():
                if not self.sharded:
                    self.optimizer.reload_model_params()
                for ddp in self.sharded:
                    ddp.reload_masters()

    def advance_schedule(self) -> None:
        """Advance the learning-rate schedule by one training step.

        Call this before the first update of the step, so that warm-up does not start with a step at 0."""
        self.scheduler.step(1)

    @profiled("optimizer/step")
    def step(self, check: LossCheck | None = None) -> dict[str, float]:
        """Take one optimizer step with the accumulated gradients, and return its metrics. A gradient or loss
        that is not finite on any rank raises NonFiniteStep on all, and the weights stay as they were.

        Returns: {prefix}/grad_norm (before clipping) and {prefix}/lr on one rank of the mesh, {} on the
            others.
        Raises: NonFiniteStep, on all ranks, if a gradient or a loss is not finite on one of them;
            InvariantError if the check fails. Nothing has changed then."""
        self.memory.use("parameters", "gradients", "optimizer")
        grad_norm, is_finite = prepare_step(self.optimizer)
        finite = [torch.tensor(is_finite, device=self.device), *(loss.isfinite() for loss in self._losses)]
        sums = (~torch.stack(finite).all()).double()[None]  # number of ranks that have a non-finite number
        if check is not None:
            sums = torch.cat([sums, check.sums(self.device)])
        dist.all_reduce(sums, group=self.groups.intra_dist_opt)
        if sums[0] > 0:
            raise NonFiniteStep(grad_norm)
        if check is not None:
            factors = reduction_factors(self.ddp, self.groups.dp_cp.size())
            check.judge(sums[1:], factors, self.groups.intra_dist_opt)
        take_step(self.optimizer, grad_norm)
        if not self.reports_steps:
            return {}
        return {
            f"{self.prefix}/grad_norm": float(grad_norm),
            f"{self.prefix}/lr": self.optimizer.param_groups[0]["lr"],
        }

    def _update(
        self,
        micro_batches: list[MicroBatch],
        request: Request,
        loss: Callable[[MicroBatch, Any], tuple[torch.Tensor, list[Metrics]]],
        ask: Callable[[], list[torch.Tensor] | None],
        of_shards: bool = False,
        check: LossCheck | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step that minimises `loss` of the last stage's output, and return this rank's
        metrics. A loss or gradient that is not finite raises NonFiniteUpdate, and the weights stay as they
        were.

        Args:
            loss: returns the loss of a micro-batch and its metrics, one dict per part of the micro-batch.
            ask: runs a pass without gradients and returns the numbers that the loss compares, as `log_probs`
                or `values` returns them.
            of_shards: loss and metrics are of this context-parallel rank's tokens. Otherwise they are of all
                tokens, the same on each rank.
            check: receives the measurements of `loss`.
        Raises: NonFiniteUpdate; InvariantError if the check fails."""
        reports = self._reports_shard if of_shards else self.reports
        if check is not None:
            check.counts = reports
        self.memory.use("gradients")
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.routing:
            self._begin_routing(micro_batches, request)
        of_micro_batches = self._forward_backward(micro_batches, request, loss, check)
        parts = [metrics for micro in of_micro_batches for metrics in micro]
        of_experts = self.routing.end_update(self.routing_prefix) if self.routing else {}
        try:
            of_step = self.step(check)
        except NonFiniteStep as error:
            raise NonFiniteUpdate(
                explain(self, error.grad_norm, micro_batches, self._losses, ask())
            ) from None
        metrics = combine({name: value.item() for name, value in m.items()} for m in parts) if reports else {}
        return metrics | of_experts | of_step

    def _begin_routing(self, micro_batches: list[MicroBatch], request: Request) -> None:
        if self.routing.needs_counts:
            with self.routing.counting():  # without responses, so that no log-probs are computed
                self._forward_only(
                    [MicroBatch(micro.batch, micro.response_positions[:0]) for micro in micro_batches],
                    request,
                    keep=lambda output: torch.zeros(()),
                )
        self.routing.begin_update(micro_batches)

    def _forward_backward(
        self,
        micro_batches: list[MicroBatch],
        request: Request,
        loss: Callable[[MicroBatch, Any], tuple[torch.Tensor, list[Metrics]]],
        check: LossCheck | None = None,
    ) -> list[list[Metrics]]:
        """Add the gradients of all micro-batches, and return the metrics of each on the last stage."""
        self._losses = []

        def forward_step(iterator, model):
            micro = next(iterator)

            def finish(output):
                with profile_range("micro_batch/loss"):
                    value, metrics = loss(micro, output)
                self._losses.append(value.detach())
                if check is not None:
                    check.end_of_forward(value)
                return value, torch.zeros((), dtype=torch.int, device=value.device), metrics

            return self._forward(model, micro, request), finish

        return self._run(self.ddp, forward_step, micro_batches, forward_only=False)

    @torch.no_grad()
    def _forward_only(
        self,
        micro_batches: list[MicroBatch],
        request: Request,
        keep: Callable[[Any], torch.Tensor] = lambda output: output,
    ) -> list[torch.Tensor] | None:
        """Run passes without gradients, and return keep(output of the last stage) for each micro-batch, on
        the CPU.

        Stages before the last one return None.
        The model is in training mode, so that a check of the output sees the model as it is trained. With
        dropout the check fails."""

        def forward_step(iterator, model):
            output = self._forward(model, next(iterator), request)
            # one tensor: with experts in the model, Megatron asks the output for its device
            return (keep(output) if model.post_process else output), lambda kept, non_loss_data: kept

        out = self._run(self.chunks, forward_step, micro_batches, forward_only=True)
        return [kept.cpu() for kept in out] if self.is_last_stage else None

    def _run(
        self,
        chunks: list[torch.nn.Module],
        forward_step: Callable,
        micro_batches: list[MicroBatch],
        forward_only: bool,
    ) -> list:
        """Run Megatron's schedule and return what the last stage collected per micro-batch."""
        self.memory.use("parameters")
        for ddp in self.sharded:
            ddp.use_whole()
        with cpu_megatron():
            return run_schedule(chunks, forward_step, micro_batches, forward_only, self.groups, self.config)

    def _shard(self, micro: MicroBatch) -> ContextShard:
        multiple = self.groups.tp.size() if self.config.sequence_parallel else 1
        multiple *= get_fp8_align_size(self.config.fp8_recipe) if self.config.fp8 else 1
        return ContextShard.of(micro.batch, self.groups.cp.size(), self.groups.cp.rank(), multiple)

    @profiled("micro_batch/forward")
    def _forward(self, model: torch.nn.Module, micro: MicroBatch, request: Request):
        shard, chunk = self._shard(micro), _unwrapped(model)
        packed = self._packed(shard)
        if self.routing:
            packed.routed = self.routing.of_pass(chunk, micro, lambda values: self._own_tokens(values, shard))
        tokens = shard.take(micro.batch.tokens, padding=0).unsqueeze(0).to(self.device)
        output = model(tokens, None, None, labels=request(micro, shard), packed_seq_params=packed)
        if self.routing:
            self.routing.end_pass(chunk, micro, packed.routed)
        return output

    def _own_tokens(self, values: torch.Tensor, shard: ContextShard) -> torch.Tensor:
        """Return the rows of the tokens that this rank's layers see, on its device; rows of padding are -1.

        `values` has a row per token of the micro-batch."""
        values = shard.take(values, padding=-1)
        if self.config.sequence_parallel:
            values = values.chunk(self.groups.tp.size())[self.groups.tp.rank()]
        return values.to(self.device)

    def _packed(self, shard: ContextShard) -> PackedSeqParams:
        """Return Megatron's description of the packed sequences.

        The lengths are of whole sequences with padding, also where this rank has a part of each sequence:
        rope and Transformer Engine divide them by the context-parallel size. The fields
        for padded lengths hold the same lengths, which says that nothing lies between sequences."""
        lengths = shard.lengths
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(self.device)
        # max_seqlen must be the true maximum. With the token count instead, Megatron switches to global rope
        # positions.
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        # PackedAttention reads these on the host.
        packed.sequence_lengths, packed.gather_order = lengths, shard.gather_order
        return packed


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without DDP. Megatron-FSDP wraps a chunk twice."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _initialize_process() -> None:
    """Initialise, once per process, the only process-wide Megatron state.

    This state is the fixes, the scratch buffer of sequence parallelism, and the RNG tracker of recompute."""
    fix_megatron()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        with cpu_megatron():
            parallel_state._set_global_memory_buffer()
            tensor_parallel.random.initialize_rng_tracker()
            for offset, name in enumerate(("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng")):
                tensor_parallel.random.get_cuda_rng_tracker().add(name, 1000 + offset)

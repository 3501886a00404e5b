"""A trainable policy on one mesh: Megatron model, DDP, distributed optimizer, learning-rate schedule.

    create_groups(mesh)                             all ranks of the world, once
    policy = Policy(shape, mesh, ...)               collective over the mesh
    policy.parameters_changed()                     after every direct write into policy.parameters
    policy.log_probs(micro_batches)                 no gradient
    policy.update(micro_batches, loss)              one optimizer step

All ranks of the mesh call every method, with equally many micro-batches. Log-probs and losses exist on the last pipeline
stage; other stages return None for them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from megarl.batch import MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.kernels.fused_linear_policy_loss import TokenLoss
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.gradients import accumulate_in_pieces
from megarl.megatron.mesh import groups_of
from megarl.megatron.model import ResponseTokens, build_policy_model, transformer_config
from megarl.megatron.optimizer import build_optimizer, build_scheduler
from megarl.metrics import combine

with cpu_megatron():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_no_pipelining,
        forward_backward_pipelining_without_interleaving,
    )

Loss = Callable[[MicroBatch, torch.Tensor, torch.Tensor | None, slice], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(micro-batch, log_probs [C], entropy [C] or None, which of its N response tokens) -> (loss divided by its global denominator, metrics)."""


class Policy:
    def __init__(self, shape: ModelShape, mesh: MeshSpec, model: ModelConfig, parallel: ParallelConfig,
                 optimizer: OptimizerConfig | None = None, train_iters: int = 1, transformer: dict[str, object] | None = None) -> None:
        """Build model and optimizer (None: frozen, forward only). The weights are undefined until they are loaded."""
        _initialize_process()
        self.shape, self.mesh, self.bf16 = shape, mesh, model.bf16
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        with cpu_megatron():
            self.groups = groups_of(mesh)
            self.config = transformer_config(shape, model, parallel, transformer or {})
            self.model = build_policy_model(self.config, shape, self.groups, parallel.qkv_layout)
            self.ddp = self._wrap(optimizer) if optimizer else None
            self.optimizer = build_optimizer(optimizer, self.ddp, self.groups, model.bf16) if optimizer else None
            self.scheduler = build_scheduler(optimizer, self.optimizer, train_iters) if optimizer else None
        # Name -> [rows, cols] view of the live weight, vectors as [n, 1]. Taken after DDP moved them into its buffer.
        self.parameters = {name: p.data.view(p.shape[0], -1) for name, p in self.model.named_parameters()}

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    @property
    def reports(self) -> bool:
        """True on one rank of every data-parallel replica: the one whose numbers are counted."""
        return self.is_last_stage and self.groups.tp.rank() == 0

    def _wrap(self, optimizer: OptimizerConfig) -> DistributedDataParallel:
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=optimizer.use_distributed_optimizer, overlap_grad_reduce=optimizer.overlap_grad_reduce,
            grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(self.config, ddp_config, self.model, pg_collection=self.groups)
        if self.bf16 and self.device.type == "cpu":
            accumulate_in_pieces(self.model)
        self.model.accumulates_into_main_grad = not optimizer.overlap_grad_reduce
        self.config.no_sync_func = ddp.no_sync
        # Losses are divided by global denominators already: no token count for Megatron to divide by.
        self.config.finalize_model_grads_func = lambda chunks, num_tokens, **kwargs: finalize_model_grads(
            chunks, None, pg_collection=self.groups)
        return ddp

    def parameters_changed(self) -> None:
        """Make the optimizer's fp32 master weights follow a direct write into `parameters`."""
        if self.optimizer is not None:
            with cpu_megatron():
                self.optimizer.reload_model_params()

    @torch.no_grad()
    def log_probs(self, micro_batches: list[MicroBatch], temperature: float) -> list[torch.Tensor] | None:
        """log pi(token) of the response tokens of each micro-batch, each [N] fp32 on the CPU; None before the last stage.

        In training mode, so that the gate sees the model as it is trained: with dropout on it fails."""
        out = self._run(micro_batches, temperature, with_entropy=False, loss=None, token_level=False)
        return [log_probs.cpu() for log_probs in out] if self.is_last_stage else None

    def update(self, micro_batches: list[MicroBatch], loss: Loss, temperature: float, with_entropy: bool = False,
               token_level: bool = True) -> dict[str, float]:
        """One optimizer step over the micro-batches of all data-parallel ranks.

        A `token_level` loss is a sum over tokens, called for a chunk of them at a time; its gradient comes with the forward pass. Any
        other is called once per micro-batch, for all of its tokens, and the output layer's product is made again in backward.

        Returns: this rank's metrics, to be summed over ranks (maxima for names ending in _max); {} where not `reports`.
        Raises: FloatingPointError if the gradient norm is not finite; the weights are then unchanged."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        per_chunk = [metrics for micro in self._run(micro_batches, temperature, with_entropy, loss, token_level) for metrics in micro]
        with cpu_megatron():
            succeeded, grad_norm, _ = self.optimizer.step()
        if not succeeded or grad_norm != grad_norm or grad_norm == float("inf"):
            raise FloatingPointError(f"gradient norm is {grad_norm}: the loss or its gradient is not finite. Lower --lr, or look at the "
                                     "rewards and log-probs of this step in rollouts/")
        metrics = combine({name: value.item() for name, value in m.items()} for m in per_chunk) if self.reports else {}
        if self.reports and self.groups.dp.rank() == 0:
            metrics["policy/grad_norm"] = float(grad_norm)
            metrics["policy/lr"] = self.optimizer.param_groups[0]["lr"]
        return metrics

    def advance_schedule(self) -> None:
        """Set the learning rate of the next step. Before the step's first update, so that warm-up does not begin with a step at 0."""
        self.scheduler.step(1)

    def _run(self, micro_batches: list[MicroBatch], temperature: float, with_entropy: bool, loss: Loss | None, token_level: bool) -> list:
        """Forward (and backward, with a loss) through Megatron's schedule -> what the last stage collected per micro-batch: log-probs, or
        with a loss its metrics, one dict per chunk."""
        model = self.ddp if loss is not None else self.model

        def forward_step(iterator, model):
            micro = next(iterator)
            token_loss = functools.partial(loss, micro) if token_level else None
            output = self._forward(model, micro, temperature, with_entropy, token_loss)
            if loss is None:  # one tensor: with experts in the model, Megatron asks the output for its device
                return (output[0] if self.is_last_stage else output), lambda log_probs, non_loss_data: log_probs

            def finish(output):
                if token_level:
                    value, metrics = output
                else:
                    value, of_all = loss(micro, *output, slice(0, len(output[0])))
                    metrics = [of_all]
                return value, torch.zeros((), dtype=torch.int, device=value.device), metrics

            return output, finish

        arguments = dict(forward_step_func=forward_step, data_iterator=iter(micro_batches), model=[model], num_microbatches=len(micro_batches),
                         seq_length=1, micro_batch_size=1, forward_only=loss is None, collect_non_loss_data=loss is None,
                         pg_collection=self.groups)
        with cpu_megatron():
            if self.groups.pp.size() == 1:
                return forward_backward_no_pipelining(**arguments)
            return forward_backward_pipelining_without_interleaving(
                **arguments, p2p_communicator=P2PCommunicator(self.groups.pp, self.config))

    def _forward(self, model: torch.nn.Module, micro: MicroBatch, temperature: float, with_entropy: bool, loss: TokenLoss | None):
        tokens, lengths = micro.batch.tokens, micro.batch.lengths.tolist()
        # Sequence parallelism needs a multiple of the tensor-parallel size: close with a sample of its own that no loss looks at.
        multiple = self.groups.tp.size() if self.config.sequence_parallel else 1
        fill = max(-len(tokens) % multiple, multiple - len(tokens), 1 if not len(tokens) else 0)
        if fill:
            tokens, lengths = torch.cat([tokens, tokens.new_zeros(fill)]), [*lengths, fill]
        wanted = ResponseTokens(micro.predict_positions.to(self.device), micro.targets.to(self.device), temperature, with_entropy,
                                method="chunked" if self.ddp else "fastest", loss=loss)
        return model(tokens.unsqueeze(0).to(self.device), None, None, labels=wanted, packed_seq_params=self._packed(lengths))

    def _packed(self, lengths: list[int]) -> PackedSeqParams:
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)
        # max_seqlen must be the true maximum: with the token count instead, Megatron switches to global rope positions.
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
                                 max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
        packed.sequence_lengths = lengths  # on the host, for PackedAttention
        return packed


def _initialize_process() -> None:
    """The only process-wide Megatron state: the scratch buffer of sequence parallelism and the RNG tracker of recompute."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        with cpu_megatron():
            parallel_state._set_global_memory_buffer()
            tensor_parallel.random.initialize_rng_tracker()
            for offset, name in enumerate(("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng")):
                tensor_parallel.random.get_cuda_rng_tracker().add(name, 1000 + offset)

"""A policy on the ranks of one role: log-probs of response tokens, and updates by a loss of these log-probs.

    create_groups(mesh)                              call on all ranks of the world, once
    policy = Policy(shape, mesh, ...)                collective over the mesh
    policy.parameters_changed()                      call after every direct write into policy.parameters
    policy.log_probs(micro_batches, temperature)     no gradient
    policy.update(micro_batches, loss, temperature)  one optimizer step

All ranks of the mesh call every method, with equally many micro-batches. Log-probs and losses exist on the
last pipeline stage. Other stages return None for them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ClassVar, Literal

import torch

from megarl.batch import MicroBatch
from megarl.megatron.context_parallel import ContextShard
from megarl.megatron.loss_check import LossCheck
from megarl.megatron.model import PolicyModel, ResponseTokens
from megarl.megatron.teacher import HeadInputs, Teaching
from megarl.megatron.trained_model import TrainedModel

Loss = Callable[
    [MicroBatch, torch.Tensor, torch.Tensor | None, slice], tuple[torch.Tensor, dict[str, torch.Tensor]]
]
"""Function that computes the loss of response tokens, divided by its global denominator, and its metrics.

Its arguments are the micro-batch with this rank's response tokens, log_probs [C], entropy [C] or None, and
the slice of these tokens that the numbers belong to."""


class Policy(TrainedModel):
    prefix: ClassVar[str] = "policy"
    routing_prefix: ClassVar[str] = "moe"
    token_values: ClassVar[tuple[str, str]] = "log-prob", "old_log_probs"
    model_class: ClassVar[type[PolicyModel]] = PolicyModel

    def log_probs(self, micro_batches: list[MicroBatch], temperature: float) -> list[torch.Tensor] | None:
        """Return log pi(token) of the response tokens, [N] fp32 on the CPU for each micro-batch.

        Stages before the last one return None."""
        with self._experts("record"):
            return self._log_probs(micro_batches, temperature)

    def _log_probs(self, micro_batches: list[MicroBatch], temperature: float) -> list[torch.Tensor] | None:
        return self._forward_only(
            micro_batches,
            lambda micro, shard: self._response_tokens(micro, shard, temperature),
            keep=lambda output: output[0],
        )

    def outputs(
        self,
        micro_batches: list[MicroBatch],
        outputs: Callable[[HeadInputs], torch.Tensor],
        temperature: float,
    ) -> list[torch.Tensor] | None:
        """Return a function of the last hidden states at the response tokens, [N, ...] on the CPU for each
        micro-batch. Stages before the last one return None."""
        return self._forward_only(
            micro_batches,
            lambda micro, shard: self._response_tokens(micro, shard, temperature, outputs=outputs),
            keep=lambda output: output[0],
        )

    def update(
        self,
        micro_batches: list[MicroBatch],
        loss: Loss,
        temperature: float,
        with_entropy: bool = False,
        token_level: bool = True,
        check: LossCheck | None = None,
        teaching: Teaching | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step over the micro-batches of all data-parallel ranks, and return this rank's
        metrics. A loss or gradient that is not finite raises NonFiniteUpdate, and the weights stay as they
        were.

        A `token_level` loss is a sum over tokens. It is called for one chunk of tokens at a time, on each
        context-parallel rank for that rank's tokens, and its gradient is computed in the forward pass. Any
        other loss is called once per micro-batch for all tokens, on every context-parallel rank, and the
        output layer's product is computed again in the backward pass. `check` receives the loss's
        measurements. With `teaching` the loss gets the divergences from the teacher in place of entropies;
        None for samples that the teacher has not read.

        Returns: this rank's metrics, to be summed over ranks (names ending in _max: maxima); {} where not
            `reports`.
        Raises: NonFiniteUpdate, on all ranks, if the loss or a gradient is not finite; InvariantError if the
            check fails. The weights are then unchanged."""

        def request(micro: MicroBatch, shard: ContextShard) -> ResponseTokens:
            return self._response_tokens(
                micro, shard, temperature, with_entropy, loss if token_level else None, teaching
            )

        def finish(micro: MicroBatch, output):
            if token_level:
                return output
            value, metrics = loss(micro, *output, slice(0, len(output[0])))
            return value, [metrics]

        with self._experts("replay"):
            ask = lambda: self._log_probs(micro_batches, temperature)
            return self._update(micro_batches, request, finish, ask, of_shards=token_level, check=check)

    def _experts(self, what: Literal["record", "replay"]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which forward passes record or replay the choice of experts, as
        --moe-routing-replay says.

        A frozen policy always chooses by its own router."""
        source = self.routing.options.moe_routing_replay if self.routing and self.ddp else "none"
        if source == "none":
            return contextlib.nullcontext()
        return self.routing.choices("replay" if source == "engine" else what)

    def _response_tokens(
        self,
        micro: MicroBatch,
        shard: ContextShard,
        temperature: float,
        with_entropy: bool = False,
        loss: Loss | None = None,
        teaching: Teaching | None = None,
        outputs: Callable[[HeadInputs], torch.Tensor] | None = None,
    ) -> ResponseTokens:
        positions, rows = shard.select(micro.predict_positions)
        part = micro if rows is None else MicroBatch(micro.batch, micro.response_positions[rows])
        teaches = teaching is not None and teaching.has_read(part)
        return ResponseTokens(
            positions.to(self.device),
            part.targets.to(self.device),
            temperature,
            with_entropy,
            method="chunked" if self.ddp else "fastest",
            loss=None if loss is None else functools.partial(loss, part),
            teacher=functools.partial(teaching.teacher, part) if teaches else None,
            outputs=outputs,
            rows=None if rows is None else rows.to(self.device),
            count=len(micro.response_positions),
        )

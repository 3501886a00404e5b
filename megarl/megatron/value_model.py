"""A value model on the ranks of one role: a critic, or a reward model that gives each sample one number.

    create_groups(mesh)                    call on all ranks of the world, once
    critic = ValueModel(shape, mesh, ...)  collective; shape = ModelShape.load(folder, value_head=True)
    critic.parameters_changed()            call after every direct write into critic.parameters
    critic.values(micro_batches)           V of the state in which each response token was chosen; no gradient
    critic.scores(micro_batches)           the value after each sample's last token; no gradient
    critic.update(micro_batches, loss)     one optimizer step

The model is the transformer of a policy with the head of transformers' ...ForSequenceClassification with one
label: value = score.weight @ hidden. All ranks of the mesh call every method, with equally many
micro-batches. Values and losses exist on all tensor- and context-parallel ranks of the last pipeline stage.
Other stages return None for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from megarl.batch import MicroBatch
from megarl.megatron.context_parallel import ContextShard
from megarl.megatron.loss_check import LossCheck
from megarl.megatron.trained_model import TrainedModel
from megarl.megatron.value_head import ValueHeadModel, ValuePositions

ValueLoss = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Function that computes the loss, divided by its global denominator, and its metrics.

Its arguments are the micro-batch and the values [N] fp32 of the micro-batch's response tokens."""


class ValueModel(TrainedModel):
    prefix: ClassVar[str] = "critic"
    routing_prefix: ClassVar[str] = "critic_moe"
    token_values: ClassVar[tuple[str, str]] = "value", "values"
    model_class: ClassVar[type[ValueHeadModel]] = ValueHeadModel

    def values(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor] | None:
        """Return the value before each response token, [N] fp32 on the CPU for each micro-batch.

        Stages before the last one return None. Element i has seen only the tokens before token i. It is the
        head's output at the position that predicts token i, so it is aligned with log_probs."""
        return self._forward_only(micro_batches, self._of_responses)

    def scores(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor] | None:
        """Return the value after the last token of each sample, [B] fp32 on the CPU for each micro-batch.

        Stages before the last one return None."""
        return self._forward_only(
            micro_batches, lambda micro, shard: self._at(micro.batch.cu_seqlens[1:] - 1, shard)
        )

    def update(
        self, micro_batches: list[MicroBatch], loss: ValueLoss, check: LossCheck | None = None
    ) -> dict[str, float]:
        """Take one optimizer step over the micro-batches of all data-parallel ranks, and return this rank's
        metrics. A loss or gradient that is not finite raises NonFiniteUpdate, and the weights stay as they
        were.

        `loss` is called once per micro-batch. `check` receives the loss's measurements.

        Returns: this rank's metrics, to be summed over ranks (names ending in _max: maxima); {} where not
            `reports`.
        Raises: NonFiniteUpdate, on all ranks, if the loss or a gradient is not finite; InvariantError if the
            check fails. The weights are then unchanged."""

        def finish(micro: MicroBatch, values: torch.Tensor):
            value, metrics = loss(micro, values)
            return value, [metrics]

        ask = lambda: self.values(micro_batches)
        return self._update(micro_batches, self._of_responses, finish, ask, check=check)

    def _of_responses(self, micro: MicroBatch, shard: ContextShard) -> ValuePositions:
        return self._at(micro.predict_positions, shard)

    def _at(self, positions: torch.Tensor, shard: ContextShard) -> ValuePositions:
        """Return the request for the values at these positions among the micro-batch's tokens."""
        here, rows = shard.select(positions)
        return ValuePositions(
            here.to(self.device), None if rows is None else rows.to(self.device), len(positions)
        )


class ScoreModel(ValueModel):
    """A reward model in training: its value of a response token is the head's output at that token itself.

    The tokens are the samples' last ones, so these values are `scores`."""

    prefix: ClassVar[str] = "policy"
    routing_prefix: ClassVar[str] = "moe"
    token_values: ClassVar[tuple[str, str]] = "score", "old_scores"

    def _of_responses(self, micro: MicroBatch, shard: ContextShard) -> ValuePositions:
        return self._at(micro.response_positions, shard)

"""GPTModel with a value head in place of the output layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from megarl.megatron.context_parallel import gather_rows
from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer import TransformerConfig


class ValueHead(torch.nn.Module):
    """A linear layer that returns one number per token: hidden @ weight, in fp32, without bias.

    The weight [1, H] is whole on every tensor-parallel rank. Under sequence parallelism each rank has a part
    of the tokens, so its gradient is a part of the weight's gradient. The weight is marked sequence_parallel,
    and finalize_model_grads sums the parts. Without sequence parallelism every rank has all tokens and the
    whole gradient. The gradient norm counts the weight once, because the weight is not marked
    tensor_model_parallel. DDP sums the parts of context-parallel ranks."""

    def __init__(self, config: TransformerConfig, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = self.sequence_parallel = config.sequence_parallel
        self.group = group

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the values [N] fp32 at `positions`, [N] int64 among all tokens.

        `hidden` is [T, 1, H], a part of the tokens under sequence parallelism."""
        if not self.sequence_parallel:
            return self._values(hidden[positions])
        # Every rank computes the same loss from all values, so each takes its part of the gradient instead of
        # summing.
        values = gather_from_sequence_parallel_region(
            self._values(hidden), tensor_parallel_output_grad=False, group=self.group
        )
        return values[positions]

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.float() @ self.weight.float().t()).flatten()


@dataclass(frozen=True)
class ValuePositions:
    """Request to a forward pass: the positions whose values `ValueHeadModel` returns; passed as GPTModel's
    `labels`."""

    positions: torch.Tensor
    """[n] int64: positions among the tokens that this rank has."""
    rows: torch.Tensor | None
    """[n] int64: indices of these values among all N wanted values. None means all."""
    count: int
    """N, the number of wanted values."""


class ValueHeadModel(GPTModel):
    """GPTModel whose last pipeline stage returns the values [N] fp32 of the requested positions.

    The positions are those of all context-parallel ranks."""

    has_value_head: ClassVar[bool] = True

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config, self.pg_collection.tp)

    def _postprocess(self, hidden_states, input_ids, position_ids, labels: ValuePositions, *args, **kwargs):
        if not self.post_process:
            return hidden_states
        return gather_rows(
            self.value_head(hidden_states, labels.positions), labels.rows, labels.count, self.pg_collection.cp
        )

"""Which tokens of a packed micro-batch a context-parallel rank has, and what the ranks tell each other.

    sequence of 8 tokens, cp 2     0 1 | 2 3 | 4 5 | 6 7        2 cp equal chunks; the last tokens may be padding
    rank 0                         0 1             6 7          chunks r and 2 cp - 1 - r: under a causal mask every rank has
    rank 1                               2 3   4 5              the same work (Transformer Engine's order for packed sequences)

Padding sits at a sequence's end, where no real token sees it. All ranks have the whole micro-batch on the
host, so each works out the split of all of them by itself; what travels is keys and values, and numbers of
response tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.batch import Batch, MicroBatch


@dataclass(frozen=True)
class ContextShard:
    """This rank's T_cp of the T tokens of a micro-batch: sequence after sequence, its two chunks of each one
    behind the other."""

    num_tokens: int
    """T_cp, with padding; the same on every rank."""
    lengths: list[int]
    """Tokens of each whole sequence with its padding, and of a last one that is all padding, if there is
    one."""
    gather_order: torch.Tensor | None = None
    """[cp * T_cp] int64: where each padded token is among the shards of rank 0, 1, ..., one after another.
    None: one rank has all."""
    place: torch.Tensor | None = None
    """[T] int64: where this rank has the token, -1 if another one does."""

    @staticmethod
    def of(batch: Batch, size: int, rank: int, multiple: int) -> ContextShard:
        """multiple: what T_cp must be one of (the ranks of sequence parallelism)."""
        lengths = batch.lengths
        padded = lengths if size == 1 else -(-lengths // (2 * size)) * (2 * size)
        # The rest is a sequence of its own that no loss looks at. Its share must be even, for two chunks.
        step = math.lcm(multiple, 2) if size > 1 else multiple
        own = int(padded.sum()) // size
        fill = max(own + -own % step, step) - own
        all_lengths = [*padded.tolist(), *([size * fill] if fill else [])]
        if size == 1:
            return ContextShard(own + fill, all_lengths)
        owner, place = _split(torch.tensor(all_lengths), size)
        here = torch.where(owner == rank, place, -1)[_real_tokens(lengths, padded)]
        return ContextShard(own + fill, all_lengths, owner * (own + fill) + place, here)

    def take(self, values: torch.Tensor, padding: int) -> torch.Tensor:
        """[T, ...] of the micro-batch's tokens -> [T_cp, ...] of this rank's."""
        taken = values.new_full((self.num_tokens, *values.shape[1:]), padding)
        if self.place is None:
            taken[: len(values)] = values
        else:
            taken[self.place[self.place >= 0]] = values[self.place >= 0]
        return taken

    def part_of(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch with those of its response tokens that this rank predicts."""
        rows = self.rows_of(micro.predict_positions)
        return micro if rows is None else MicroBatch(micro.batch, micro.response_positions[rows])

    def rows_of(self, positions: torch.Tensor) -> torch.Tensor | None:
        """[n] int64: which of N positions in the micro-batch's tokens this rank has. None: all."""
        return None if self.place is None else (self.place[positions] >= 0).nonzero()[:, 0]

    def local(self, positions: torch.Tensor) -> torch.Tensor:
        """Where this rank has the tokens at positions in the micro-batch's."""
        return positions if self.place is None else self.place[positions]


def _split(padded: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rank, position there) of every token of sequences of these lengths, each a multiple of 2 * size."""
    chunk = (padded // (2 * size)).repeat_interleave(padded)
    starts = padded.cumsum(0) - padded
    position = torch.arange(int(padded.sum())) - starts.repeat_interleave(padded)
    number, offset = position // chunk, position % chunk
    second = number >= size
    owner = torch.where(second, 2 * size - 1 - number, number)
    return owner, starts.repeat_interleave(padded) // size + second * chunk + offset


def _real_tokens(lengths: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """[T] int64: where the tokens are once every sequence is padded at its end."""
    padding_before = (padded - lengths).cumsum(0) - (padded - lengths)
    return torch.arange(int(lengths.sum())) + padding_before.repeat_interleave(lengths)


def gather_rows(
    values: torch.Tensor, rows: torch.Tensor | None, count: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """[n] numbers of this rank's rows -> [count] of all ranks', on each. Collective over the context-parallel
    group.

    The gradient of a rank's rows is what its own loss gives them: every rank must compute the same loss of
    them all."""
    return values if rows is None else _GatherRows.apply(values, rows, count, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, rows, count, group):
        ctx.save_for_backward(rows)
        whole = values.new_zeros(count)
        whole[rows] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad[rows], None, None, None


def gather_sequences(shard: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T_cp, ...] of this rank -> [cp * T_cp, ...] of all, in the order of the padded sequences. Collective
    over the group.

    The gradients that all ranks have for a shard are summed: each rank's queries look at every key."""
    return _GatherSequences.apply(shard, order, group)


class _GatherSequences(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, order, group):
        ctx.group = group
        ctx.save_for_backward(order)
        gathered = shard.new_empty(len(order), *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=group)
        return gathered[order]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grad)
        by_rank[order] = grad
        summed = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(summed, by_rank, group=ctx.group)
        return summed, None, None

"""Split packed micro-batches over context-parallel ranks, and gather their results.

    sequence of 8 tokens, cp 2     0 1 | 2 3 | 4 5 | 6 7    2 cp equal chunks; the last may have padding
    rank 0                         0 1             6 7      chunks r and 2 cp - 1 - r
    rank 1                               2 3   4 5

Under a causal mask this split gives every rank the same work. It is Transformer Engine's order for packed
sequences. Padding sits at the end of a sequence, where no real token sees it. All ranks have the whole
micro-batch on the host, so each computes the split of all ranks by itself. The ranks exchange only keys,
values and one number per response token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.batch import Batch


@dataclass(frozen=True)
class ContextShard:
    """The T_cp tokens, with padding, of a packed micro-batch that this context-parallel rank holds, as index
    maps.

    The sequences follow one another; the two chunks of each sequence are adjacent."""

    num_tokens: int
    """T_cp, with padding. The number is the same on every rank."""
    lengths: list[int]
    """Tokens of each whole sequence with its padding, and of a final all-padding sequence if there is one."""
    gather_order: torch.Tensor | None = None
    """[cp * T_cp] int64: index of each padded token in the concatenated shards of rank 0, 1, ...

    None if one rank has all tokens."""
    place: torch.Tensor | None = None
    """[T] int64: index of each token on this rank, or -1 if another rank has the token."""

    @staticmethod
    def of(batch: Batch, size: int, rank: int, multiple: int) -> ContextShard:
        """Return which tokens of `batch` context-parallel rank `rank` of `size` ranks holds.

        `multiple` is the number that must divide T_cp (the number of sequence-parallel ranks)."""
        lengths = batch.lengths
        padded = lengths if size == 1 else -(-lengths // (2 * size)) * (2 * size)
        # The remainder is a sequence of its own that no loss reads. Each rank's part must be even, for two
        # chunks.
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
        """Return this rank's rows [T_cp, ...] of `values` [T, ...]; rows without a token hold `padding`."""
        taken = values.new_full((self.num_tokens, *values.shape[1:]), padding)
        if self.place is None:
            taken[: len(values)] = values
        else:
            taken[self.place[self.place >= 0]] = values[self.place >= 0]
        return taken

    def select(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return those of N positions in the micro-batch that this rank holds, as positions on this rank and
        as indices among the N.

        Returns: [n] int64 positions on this rank, and [n] int64 indices of them among the N positions; None
            means all."""
        if self.place is None:
            return positions, None
        rows = (self.place[positions] >= 0).nonzero()[:, 0]
        return self.place[positions[rows]], rows


def _split(padded: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors with an entry for every padded token: its rank, and its position on that rank.

    The sequences have the given padded lengths, each a multiple of 2 * size."""
    chunk = (padded // (2 * size)).repeat_interleave(padded)
    starts = padded.cumsum(0) - padded
    position = torch.arange(int(padded.sum())) - starts.repeat_interleave(padded)
    number, offset = position // chunk, position % chunk
    second = number >= size
    owner = torch.where(second, 2 * size - 1 - number, number)
    return owner, starts.repeat_interleave(padded) // size + second * chunk + offset


def _real_tokens(lengths: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """Return [T] int64: the position of each token once every sequence is padded at its end."""
    padding_before = (padded - lengths).cumsum(0) - (padded - lengths)
    return torch.arange(int(lengths.sum())) + padding_before.repeat_interleave(lengths)


def gather_rows(
    values: torch.Tensor, rows: torch.Tensor | None, count: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return all [count] numbers, or rows of numbers, on every context-parallel rank; this rank gives the [n]
    numbers at indices `rows`.

    Collective over the context-parallel group. A rank's rows receive only the gradient of its own loss, so
    every rank must compute the same loss of all numbers."""
    return values if rows is None else _GatherRows.apply(values, rows, count, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, rows, count, group):
        ctx.save_for_backward(rows)
        whole = values.new_zeros(count, *values.shape[1:])
        whole[rows] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad[rows], None, None, None


def gather_sequences(shard: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [T_cp, ...] of each rank into [cp * T_cp, ...] in the order of the padded sequences.

    Collective over the group. The backward pass sums the gradients of all ranks for a shard, because the
    queries of each rank attend to every key."""
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

"""Divergences of a policy (student) from a teacher over the vocabulary, and their gradients.

With p the student's probabilities and q the teacher's:

    reverse-kl   sum p (log p - log q)
    forward-kl   sum q (log q - log p)
    jsd          beta sum q (log q - log m) + (1 - beta) sum p (log p - log m),   m = beta q + (1 - beta) p

jsd is the generalized Jensen-Shannon divergence of arXiv:2306.13649. For a small beta it is beta times the
forward KL, for a beta near 1 it is 1 - beta times the reverse KL. All have a gradient of one form: with
g_j = d divergence / d p_j up to a constant,

    d divergence / d logit_j = (p_j g_j - p_j sum_i p_i g_i) / temperature

There are two ways to know the teacher:

    TeacherHead   its hidden states, and this rank's rows of its output layer: exact, over the whole vocabulary
    TeacherTopK   ids and log-probs of its k most likely tokens: exact over k + 1 outcomes, the last of which stands
                  for all other tokens. It is at most the exact divergence, as merging outcomes loses
                  information.

A teacher may know more tokens than the student. Its probabilities are over the student's vocabulary.

These are PyTorch operations on blocks of rows of a chunk of logits, on every device. Ranks add up two numbers
per token; beside the logits of the student's chunk there are those of the teacher's, whose memory takes the
gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.kernels.linear_head import LinearHead
from megarl.kernels.log_probs import Softmax

_BLOCK_ELEMENTS_CPU, _BLOCK_ELEMENTS = 2**19, 2**25


class Divergence(NamedTuple):
    """Which divergence is meant."""

    kind: Literal["reverse-kl", "forward-kl", "jsd"] = "reverse-kl"
    beta: float = 0.5
    """For jsd: weight of the teacher, above 0 and below 1."""

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each outcome adds to the divergence, and p g. Shapes are those of `log_p`."""
        if self.kind == "reverse-kl":
            both = log_p.exp() * (log_p - log_q)
            return both, both
        if self.kind == "forward-kl":
            q = log_q.exp()
            return q * (log_q - log_p), -q
        beta = self.beta
        log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
        slope = (1 - beta) * log_p.exp() * (log_p - log_m)
        return beta * log_q.exp() * (log_q - log_m) + slope, slope


def divergence_ref(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    vocab_size: int,
    divergence: Divergence,
    temperature: float = 1.0,
    top_k: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Specification for tests: return the [N] divergences of unsplit logits [N, V] in `dtype`, for
    autograd."""
    p, q = (
        torch.softmax(x[:, :vocab_size].to(dtype) / temperature, dim=-1) for x in (logits, teacher_logits)
    )
    if top_k is not None:
        ids = q.topk(top_k, dim=-1).indices
        p, q = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, True)], 1) for x in (p, q))
    kl = lambda a, b: (a * (a.log() - b.log())).sum(-1)
    if divergence.kind == "reverse-kl":
        return kl(p, q)
    if divergence.kind == "forward-kl":
        return kl(q, p)
    m = divergence.beta * q + (1 - divergence.beta) * p
    return divergence.beta * kl(q, m) + (1 - divergence.beta) * kl(p, m)


class Teacher(Protocol):
    """The teacher with which the student is compared, for the N rows of one call."""

    def compare(
        self, rows: slice, softmax: Softmax, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Return the divergences [C] of a chunk of rows, and their gradient by the student's logits [C,
        V_tp].

        `softmax` is the student's. A collective of `group`."""


def log_softmax_of(softmax: Softmax, rows: slice) -> Tensor:
    """Return log p of some rows over this rank's real columns, [C, num_real], in the dtype of the results."""
    kept = softmax.kept[rows, : softmax.num_real].to(softmax.entropy.dtype, copy=True)
    if softmax.is_log_q:
        return kept if softmax.shift is None else kept.add_(softmax.shift[rows, None])
    largest, log_sum = softmax.shift[rows].unbind(1)
    return kept.div_(softmax.temperature).sub_(largest[:, None]).sub_(log_sum[:, None])


def _blocks(kept: Tensor) -> list[slice]:
    elements = _BLOCK_ELEMENTS_CPU if kept.device.type == "cpu" else _BLOCK_ELEMENTS
    size = max(1, elements // max(kept.shape[1], 1))
    return [slice(first, min(first + size, len(kept))) for first in range(0, len(kept), size)]


class TeacherHead:
    """A teacher whose output layer is here.

    Args:
        hidden: [N, H_teacher], of the teacher at the same rows.
        weight: [V_tp, H_teacher], the teacher's rows for this rank's columns of the student's vocabulary.
        targets, vocab_size, group, temperature: the student's."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        divergence: Divergence,
        *,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
    ) -> None:
        self.head = LinearHead(hidden, weight, targets, vocab_size, group, temperature)
        self.divergence = divergence

    def compare(
        self, rows: slice, softmax: Softmax, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """See `Teacher`. The gradient is in the memory of the teacher's logits."""
        _, _, teacher = self.head.softmax(rows, with_entropy=False)
        gradient, num_real = teacher.kept, softmax.num_real
        sums = torch.zeros(2, len(gradient), dtype=softmax.entropy.dtype, device=gradient.device)
        for block in _blocks(gradient):
            log_p, log_q = log_softmax_of(softmax, block), log_softmax_of(teacher, block)
            value, slope = self.divergence.terms(log_p, log_q)
            sums[0, block], sums[1, block] = value.sum(1), slope.sum(1)
            gradient[block, :num_real] = slope
        if group is not None:
            dist.all_reduce(sums, group=group)
        for block in _blocks(gradient):
            p = log_softmax_of(softmax, block).exp_()
            part = gradient[block, :num_real].sub_(p.mul_(sums[1, block, None]))
            part.div_(softmax.temperature)
        gradient[:, num_real:] = 0
        return sums[0], gradient


@dataclass
class TeacherTopK:
    """A teacher of which the k most likely tokens of each row are known."""

    ids: Tensor
    """[N, k] int64, this rank's columns: negative or beyond its columns for other ranks' tokens."""
    log_probs: Tensor
    """[N, k] fp32, over the student's vocabulary."""
    divergence: Divergence

    def compare(
        self, rows: slice, softmax: Softmax, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """See `Teacher`."""
        num_real = softmax.num_real
        ids, log_q = self.ids[rows], self.log_probs[rows].to(softmax.entropy.dtype)
        is_local = (ids >= 0) & (ids < num_real)
        columns = ids.clamp(0, max(num_real - 1, 0))
        log_p = torch.zeros_like(log_q)
        for block in _blocks(softmax.kept) if num_real else ():
            log_p[block] = log_softmax_of(softmax, block).gather(1, columns[block])
        log_p = log_p.where(is_local, 0.0)
        if group is not None:
            dist.all_reduce(log_p, group=group)
        value, slope = self.divergence.terms(_with_rest(log_p), _with_rest(log_q))
        mean, rest = slope.sum(1), _with_rest(log_p)[:, -1].exp()
        gradient = torch.zeros_like(softmax.kept, dtype=softmax.entropy.dtype)
        for block in _blocks(gradient) if num_real else ():
            p = log_softmax_of(softmax, block).exp_()
            # a token outside the k has the slope of their sum
            part = p.mul_((slope[block, -1] / rest[block] - mean[block])[:, None])
            of_top = slope[block, :-1] - log_p[block].exp() * mean[block, None]
            gradient[block, :num_real] = _scatter(part, columns[block], of_top, is_local[block])
        return value.sum(1), gradient.div_(softmax.temperature)


def _scatter(part: Tensor, columns: Tensor, values: Tensor, is_local: Tensor) -> Tensor:
    """Return `part` with `values` at `columns`, but where not `is_local`, in which case a column may be one
    that another value is for."""
    padded = torch.cat([part, part.new_zeros(len(part), 1)], 1)
    return padded.scatter_(1, columns.where(is_local, part.shape[1]), values)[:, :-1]


def _with_rest(log_probs: Tensor) -> Tensor:
    """Return [C, k + 1] log-probs, the last of all other tokens together."""
    least = torch.finfo(log_probs.dtype).eps  # a sum of probabilities is right to this
    rest = (1 - log_probs.exp().sum(1, True)).clamp(min=least)
    return torch.cat([log_probs, rest.log()], 1)


@torch.no_grad()
def teacher_top_k(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    k: int,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return ids [N, k] int64 and log-probs [N, k] fp32 of the k most likely of the first `vocab_size` tokens
    of each row, most likely first. A collective of `group`; the arguments are those of `linear_log_probs`."""
    head = LinearHead(hidden, weight, targets, vocab_size, group, temperature)
    first = 0 if group is None else dist.get_rank(group) * len(weight)
    ids, log_probs = [targets.new_zeros(0, k)], [head.hidden.new_zeros(0, k, dtype=head.dtype)]
    for rows in head.chunks():
        _, _, softmax = head.softmax(rows, with_entropy=False)
        parts = []
        for block in _blocks(softmax.kept):
            count = block.stop - block.start
            best = torch.full((count, k), -math.inf, dtype=head.dtype, device=hidden.device)
            at = torch.zeros(count, k, dtype=torch.int64, device=hidden.device)
            if num_here := min(k, softmax.num_real):
                values, columns = log_softmax_of(softmax, block).topk(num_here, dim=1)
                best[:, :num_here], at[:, :num_here] = values, columns + first
            parts.append((best, at))
        best, at = (torch.cat(of_blocks) for of_blocks in zip(*parts, strict=True))
        if head.group is not None:
            size = dist.get_world_size(head.group)
            of_ranks = (
                [torch.empty_like(best) for _ in range(size)],
                [torch.empty_like(at) for _ in range(size)],
            )
            dist.all_gather(of_ranks[0], best, group=head.group)
            dist.all_gather(of_ranks[1], at, group=head.group)
            best, at = (torch.cat(one, 1) for one in of_ranks)
        best, order = best.topk(k, dim=1)
        ids.append(at.gather(1, order))
        log_probs.append(best)
    return torch.cat(ids), torch.cat(log_probs)

"""Log-probabilities (and entropies) of given tokens under a softmax whose vocabulary is split over
tensor-parallel ranks.

    y = logits / temperature              real columns only: a padded column takes no part
    log_probs[i] = y[i, targets[i]] - log sum_j exp(y[i, j])
    entropy[i]   = -sum_j p[i, j] log p[i, j],   p = softmax(y)

A rank makes the log-softmax of its own columns (log_q, log-sum-exp z, entropy h). Ranks merge with one MAX
all-reduce, M = max z, and one SUM all-reduce of three numbers per token, 16 bytes in all:

    S = sum exp(z - M)        log_prob = [log_q_target + z - M] - log S        entropy = sum exp(z - M) (h - z + M) / S + log S

For g = dL/dlog_prob and h = dL/dentropy the gradient needs nothing from the other ranks:

    dL/dlogits_j = (g (1[j = target] - p_j) - h p_j (log p_j + entropy)) / temperature

Logits may be -inf (banned tokens), on a rank all of them: its S is 0 then. A row of which every rank has -inf
alone is NaN.

Memory beyond the logits: a full-precision forward that will be differentiated keeps one [N, V_tp] buffer,
which the backward turns into the gradient in place. For bf16 and fp16 logits nothing is kept but the logits,
and fp32 exists one chunk of rows at a time. Without autograd there is only the chunk. `inplace=True` spares
the other [N, V_tp] buffer too.

The log-prob is the one of Megatron's `vocab_parallel_cross_entropy` (arXiv:1909.08053, section 3), but with
temperature and entropy, without padded columns (they carry untrained logits; the engine that samples masks
them), and from a maximum that starts at -inf, not at 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.kernels.backend import backend
from megarl.kernels.checks import check_targets

# Elements of one chunk of rows. CPU: 2 MiB in fp32, about what a core caches. Others: 128 MiB in fp32, many
# waves of work.
_CHUNK_ELEMENTS_CPU = 2**19
_CHUNK_ELEMENTS = 2**25
# In an entropy a smaller probability counts as 2**-100: invisible in the sum, and p log p is never 0 * inf.
_MIN_LOG2 = -100.0
_LN2, _LOG2E = math.log(2.0), math.log2(math.e)


def vocab_parallel_log_probs_ref(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Specification of `vocab_parallel_log_probs` for tests: return log-probs and entropies of unsplit logits
    [N, V], computed in `dtype`."""
    log_probs = torch.log_softmax(logits[:, :vocab_size].to(dtype) / temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], entropy


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of `targets`, and entropies, with gradients to `logits`. A collective of `group`.

    Args:
        logits: [N, V_tp] any float dtype; this rank's columns [rank * V_tp, (rank + 1) * V_tp) of the padded
            vocabulary. All ranks have the same N and V_tp; N may be 0, and a rank may hold padding only.
        targets: [N] int64 global token ids, the same on every rank.
        vocab_size: real tokens. Columns from there on are padding: probability 0, gradient 0, content
            ignored.
        group: the tensor-parallel group. None (or a group of one): `logits` is the whole vocabulary.
        temperature: what the logits are divided by; the sampler's.
        with_entropy: also return the entropy of each row's softmax.
        inplace: the memory of `logits` becomes the backward's buffer and then its gradient. The caller must
            not read it afterwards; if autograd needs its values for another gradient, backward raises
            RuntimeError. Nothing is overwritten where no gradient is recorded.

    Returns:
        log_probs [N] and entropy [N] (None unless `with_entropy`), the same on every rank, fp32 (fp64 for
        fp64 logits). Backward expects the same incoming gradients on every rank, and can run once.

    Raises:
        ValueError: wrong shape, dtype or vocab_size; a target outside [0, vocab_size) on CPU. (Elsewhere
            checking targets would stop the stream; such a token's log-prob is NaN.)
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be a float tensor [N, V_tp], got {logits.dtype} {list(logits.shape)}")
    num_rows, num_columns = logits.shape
    rank, num_ranks = rank_in(group)
    check_targets(targets, logits, "logits", vocab_size, num_columns * num_ranks, temperature)
    if num_ranks == 1 or num_rows == 0:
        group = None
    first_column = rank * num_columns
    num_real = min(max(vocab_size - first_column, 0), num_columns)
    keep = torch.is_grad_enabled() and logits.requires_grad
    log_probs, entropy = _VocabParallelLogProbs.apply(
        logits, targets - first_column, num_real, group, float(temperature), with_entropy, inplace, keep
    )
    return nan_outside(log_probs, targets, vocab_size), entropy


def rank_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in the tensor-parallel group, and the number of ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def nan_outside(log_probs: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return `log_probs` with NaN for targets that are no token of the vocabulary; on a CPU `check_targets`
    has refused those."""
    if targets.device.type == "cpu":
        return log_probs
    return torch.where((targets >= 0) & (targets < vocab_size), log_probs, math.nan)


def local_columns(local_targets: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """Return the targets' columns, and whether they are among this rank's columns.

    A token of another rank gets any column that exists; what is read there or added to it becomes 0."""
    is_local = (local_targets >= 0) & (local_targets < num_real)
    return local_targets.clamp(0, max(num_real - 1, 0)), is_local


class _VocabParallelLogProbs(torch.autograd.Function):
    """Autograd function that keeps log_q, the log-softmax of this rank's columns, or (bf16, fp16, Triton)
    the logits, to recompute it."""

    @staticmethod
    def forward(ctx, logits, local_targets, num_real, group, temperature, with_entropy, inplace, keep):
        log_q = None
        if keep and logits.dtype in (torch.float32, torch.float64) and not runs_triton(logits):
            log_q = logits if inplace else torch.empty_like(logits)
        log_probs, entropy, softmax = softmax_rows(
            logits,
            local_targets,
            num_real=num_real,
            group=group,
            temperature=temperature,
            with_entropy=with_entropy,
            log_q=log_q,
        )
        if keep:
            *tensors, ctx.num_real, ctx.temperature, ctx.is_log_q = softmax
            ctx.save_for_backward(*tensors)
            ctx.inplace = inplace or log_q is not None
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 8
        softmax = Softmax(*ctx.saved_tensors, ctx.num_real, ctx.temperature, ctx.is_log_q)
        out = softmax.kept if ctx.inplace else torch.empty_like(softmax.kept)
        return softmax_gradient(softmax, grad_log_probs, grad_entropy, out), *[None] * 7


class Softmax(NamedTuple):
    """State that the gradient of a softmax over some rows needs. Beside `kept` nothing is larger than one
    number per row."""

    kept: Tensor
    """[N, V_tp]: log_q in the dtype of the results, or the logits."""
    shift: Tensor | None
    """[N]: log p - log_q, or None for 0. Of the Triton kernels [N, 2]: what to take off a scaled logit to
    have log p, in two parts."""
    targets: Tensor
    """[N] int64 columns of this rank; any column where not `is_local`."""
    is_local: Tensor
    """[N] bool: the target is among this rank's columns."""
    entropy: Tensor
    """[N], over all ranks."""
    num_real: int
    temperature: float
    is_log_q: bool


def runs_triton(logits: Tensor) -> bool:
    """Return whether Triton, not PyTorch, computes an op on these logits. Its kernels compute in fp32;
    float64, which is for checks, runs in PyTorch everywhere."""
    return logits.dtype != torch.float64 and backend(logits) == "triton"


def softmax_rows(
    logits: Tensor,
    local_targets: Tensor,
    *,
    num_real: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    with_entropy: bool,
    log_q: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Softmax]:
    """Return (log_probs, entropy or None, state for the gradient) of checked arguments. A collective of
    `group`. Records no gradient.

    Args:
        local_targets: [N] int64 token ids less this rank's first column: negative or beyond its columns for
            other ranks' tokens.
        num_real: this rank's columns that are not padding.
        log_q: [N, V_tp] fp32 or fp64, written and kept for the gradient; may be `logits`. None: `logits` is
            kept. PyTorch only.
    """
    dtype = logits.dtype if logits.dtype in (torch.float32, torch.float64) else torch.float32
    targets, is_local = local_columns(local_targets, num_real)
    triton = runs_triton(logits)
    if triton and num_real and len(logits):
        from megarl.kernels import log_probs_triton

        log_probs, entropy, m, log_s = log_probs_triton.logits_stats(
            logits, targets, num_real, temperature, with_entropy
        )
        log_z = m + log_s
    else:
        log_probs, entropy, log_z = _stats(
            logits, targets, num_real, temperature, with_entropy, log_q, group is not None, dtype
        )
        m, log_s = torch.zeros_like(log_z), log_z
    shift = None
    if group is not None:
        log_probs, entropy, shift = merge_ranks(log_probs, entropy, log_z, is_local, with_entropy, group)
        # A rank without probability in a row has none in the gradient.
        log_s = torch.where(shift == -math.inf, math.inf, log_s - shift)
    if triton:
        shift = torch.stack([m, log_s], 1)
    kept = logits if log_q is None else log_q
    softmax = Softmax(kept, shift, targets, is_local, entropy, num_real, temperature, log_q is not None)
    # Rounding must not make a certain token more than certain. NaN stays NaN.
    return log_probs.clamp_(max=0), entropy if with_entropy else None, softmax


def _stats(
    logits, targets, num_real, temperature, with_entropy, log_q_out, with_log_z, dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return statistics of this rank's columns: log_q at the targets [N], entropy [N] (0 unless wanted),
    log-sum-exp [N] (0 unless wanted)."""
    log_probs, entropy, log_z = (
        torch.zeros(len(logits), dtype=dtype, device=logits.device) for _ in range(3)
    )
    if num_real == 0:
        log_z.fill_(-math.inf)
    for rows, scaled in _scaled_chunks(logits, num_real, temperature, dtype, alias=log_q_out is not logits):
        log_q = _log_softmax(scaled, is_shard=with_log_z, out=None if log_q_out is None else log_q_out[rows])
        log_probs[rows] = log_q.gather(1, targets[rows, None])[:, 0]
        if with_log_z:
            largest = scaled.amax(-1)
            log_z[rows] = torch.where(largest == -math.inf, largest, largest - log_q.amax(-1))
        if with_entropy:
            log2_q = (log_q * _LOG2E).clamp_min_(_MIN_LOG2)
            entropy[rows] = torch.linalg.vecdot(log2_q.exp2(), log2_q).mul_(-_LN2)
    return log_probs, entropy, log_z


def _log_softmax(scaled: Tensor, is_shard: bool, out: Tensor | None = None) -> Tensor:
    """Return the log-softmax of each row. A row of -inf alone is NaN, unless it is a shard: then its
    probabilities are 0, and those of other ranks may not be."""
    log_q = torch.log_softmax(scaled, dim=-1, out=out)
    if is_shard and bool((undefined := log_q[:, 0].isnan()).any()):
        log_q[undefined & (scaled.amax(-1) == -math.inf)] = -math.inf
    return log_q


def softmax_gradient(
    softmax: Softmax, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, out: Tensor
) -> Tensor:
    """Write dL/dlogits [N, V_tp] for dL/dlog_prob [N] and dL/dentropy [N] into `out`, any float dtype, and
    return it; may be `softmax.kept`."""
    kept, shift, targets, is_local, entropy, num_real, temperature, is_log_q = softmax
    at_target = torch.zeros_like(entropy) if grad_log_probs is None else grad_log_probs / temperature
    row_scale, entropy_scale = -at_target, None
    if grad_entropy is not None:
        row_scale = row_scale - grad_entropy / temperature * entropy
        entropy_scale = grad_entropy * (-_LN2 / temperature)
    at_target = torch.where(is_local, at_target, 0)
    if runs_triton(kept) and num_real and len(kept):
        from megarl.kernels import log_probs_triton

        return log_probs_triton.dlogits(
            kept, shift, targets, at_target, row_scale, entropy_scale, num_real, temperature, out
        )
    is_shard = shift is not None
    for rows, log_q in _log_q_chunks(kept, num_real, temperature, is_log_q, entropy.dtype, is_shard):
        log2_p = log_q.mul_(_LOG2E)
        if shift is not None:
            log2_p.add_(shift[rows, None], alpha=_LOG2E)
        if entropy_scale is None:
            part = log2_p.exp2_().mul_(row_scale[rows, None])
        else:
            p = log2_p.clamp_min_(_MIN_LOG2).exp2()
            part = log2_p.mul_(entropy_scale[rows, None]).add_(row_scale[rows, None]).mul_(p)
        part.scatter_add_(1, targets[rows, None], at_target[rows, None])
        if not (is_log_q and out is kept):
            out[rows] = part
    out[:, num_real:] = 0
    return out


def merge_ranks(log_probs, entropy, log_z, is_local, with_entropy, group) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the statistics of all ranks' columns into log-probs [N], entropy [N], and the difference [N]
    between log p and this rank's log_q."""
    largest = log_z.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    offset = log_z - largest
    share = offset.exp()
    # Among -inf logits alone log_probs are undefined.
    at_target = torch.where(offset == -math.inf, offset, log_probs + offset)
    sums = [share, torch.where(is_local, at_target, 0)]
    if with_entropy:
        sums.append(torch.where(share > 0, share * (entropy - offset), 0))
    sums = torch.stack(sums)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
    log_sum = sums[0].log()
    return sums[1] - log_sum, sums[2] / sums[0] + log_sum if with_entropy else entropy, offset - log_sum


def _scaled_chunks(
    logits: Tensor, num_real: int, temperature: float, dtype: torch.dtype, alias: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, logits[rows] / temperature in `dtype` with -inf in padded columns), a chunk of rows at a
    time; none without a column. Each chunk is overwritten by the next, unless it is a view of the logits,
    which `alias` allows where nothing has to change."""
    elements = _CHUNK_ELEMENTS_CPU if logits.device.type == "cpu" else _CHUNK_ELEMENTS
    num_rows = min(max(1, elements // logits.shape[1]), len(logits))
    unchanged = logits.dtype == dtype and temperature == 1 and num_real == logits.shape[1]
    scratch = None
    if not (unchanged and alias):
        scratch = torch.full((num_rows, logits.shape[1]), -math.inf, dtype=dtype, device=logits.device)
    for first in range(0, len(logits) if num_real else 0, max(num_rows, 1)):
        rows = slice(first, min(first + num_rows, len(logits)))
        if scratch is None:
            yield rows, logits[rows]
            continue
        real = scratch[: rows.stop - first, :num_real].copy_(logits[rows, :num_real])
        if temperature != 1:
            real.div_(temperature)
        yield rows, scratch[: rows.stop - first]


def _log_q_chunks(
    kept: Tensor, num_real: int, temperature: float, is_log_q: bool, dtype: torch.dtype, is_shard: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, log_q[rows]) that the caller may overwrite: the kept memory itself, or recomputed from
    kept logits."""
    if is_log_q:
        yield from _scaled_chunks(kept, kept.shape[1] if num_real else 0, 1.0, dtype, alias=True)
    else:
        for rows, scaled in _scaled_chunks(kept, num_real, temperature, dtype, alias=False):
            yield rows, _log_softmax(scaled, is_shard)

"""Log-probs (and entropies) of targets straight from hidden states and the output layer, without logits [N,
V].

    logits = hidden weight^T      then as in log_probs.py

Two ways to the same numbers, up to rounding:

    chunked   a matrix product of PyTorch per chunk of rows into one fp32 buffer, then a pass over it (linear_head.py)
    tiles     one persistent Triton kernel whose tiles of logits never leave the registers; they leave behind maximum, sum of
              exponentials and of p log p: 12 bytes per row and 256 columns, merged in a fixed order

2 N V_tp H FLOPs forward. Backward makes the logits again: 8 N V_tp H in all (`fused_linear_policy_loss` takes
6, but must know the loss). What is differentiated goes in chunks, whose logits are the same bits again: of
logits around -120, two different matrix products disagree by 1e-5, and so would p and its normaliser. Kept
for backward: the inputs and up to three numbers per row. The tiles are an online softmax as in
cut-cross-entropy (arXiv:2411.09009), with entropies, without its locks and atomic sums: results are bitwise
repeatable.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.kernels.checks import check_choice
from megarl.kernels.linear_head import LinearHead, check_head, check_main_grad
from megarl.kernels.log_probs import (
    Softmax,
    local_columns,
    merge_ranks,
    nan_outside,
    runs_triton,
    vocab_parallel_log_probs_ref,
)

if TYPE_CHECKING:
    from megarl.kernels.linear_log_probs_triton import Tiles

Method = Literal["fastest", "chunked"]

_measured: dict[tuple, Tiles | None] = {}
"""(device, dtype, rows up to a power of two, V_tp and H, vocabulary, entropy, group, strides, alignment) ->
the fastest tiles, or None where chunks are faster."""


def linear_log_probs_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Specification of `linear_log_probs` for tests: return log-probs and entropies with the unsplit weight
    [V, H], computed in `dtype`."""
    logits = hidden.to(dtype) @ weight.to(dtype).t()
    return vocab_parallel_log_probs_ref(
        logits, targets, vocab_size=vocab_size, temperature=temperature, dtype=dtype
    )


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    main_grad: Tensor | None = None,
    method: Method = "fastest",
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of `targets`, and entropies, with gradients to `hidden` and `weight`. A collective of
    `group`, in backward too.

    Args:
        hidden: [N, H] bf16, fp16, fp32 or fp64, the same on every rank. Its gradient comes back summed over
            ranks.
        weight: [V_tp, H] like hidden; this rank's rows [rank * V_tp, (rank + 1) * V_tp) of the padded output
            layer, all finite.
        targets: [N] int64 global token ids.
        vocab_size: real tokens. Rows of the weight from there on are padding: probability 0, gradient 0.
        group: the tensor-parallel group. None (or a group of one): `weight` is the whole vocabulary.
        temperature: what the logits are divided by; the sampler's.
        with_entropy: also return the entropy of each row's softmax.
        main_grad: [V_tp, H] fp32 (fp64 for fp64). Backward adds the weight's gradient to it and gives
            `weight` None.
        method: "fastest", without autograd on CUDA, measures tiles and chunks once per shape; "chunked" gives
            the bits of `fused_linear_policy_loss`, so that the ratio of a policy to itself is exactly 1.

    Returns: log_probs [N] and entropy [N] (None unless `with_entropy`), the same on every rank, fp32 (fp64
    for fp64).

    Raises: ValueError: wrong shape, dtype, vocab_size or method; a target outside [0, vocab_size) on CPU
    (elsewhere: NaN).
    """
    check_head(hidden, weight, targets, vocab_size, group, temperature)
    check_main_grad(main_grad, weight)
    check_choice("method", method, Method)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearLogProbs.apply(
            hidden, weight, targets, vocab_size, group, temperature, with_entropy, main_grad
        )
    with torch.no_grad():
        head = LinearHead(hidden, weight, targets, vocab_size, group, temperature)
        tiles = _fastest_tiles(head, with_entropy) if method == "fastest" else None
        if tiles is not None:
            return _tiles(head, with_entropy, tiles)
        return _chunks(head, with_entropy)[:2]


class _LinearLogProbs(torch.autograd.Function):
    """Autograd function that keeps its inputs and, per row, up to three numbers."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_size, group, temperature, with_entropy, main_grad):
        log_probs, entropy, shift = _chunks(
            LinearHead(hidden, weight, targets, vocab_size, group, temperature), with_entropy
        )
        ctx.save_for_backward(hidden, weight, targets, entropy, shift)
        ctx.arguments, ctx.main_grad = (vocab_size, group, temperature), main_grad
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, targets, entropy, shift = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 8
        head = LinearHead(hidden, weight, targets, *ctx.arguments)
        grad_hidden = torch.zeros_like(head.hidden) if wants_hidden else None
        grad_weight = None
        if wants_weight:
            grad_weight = head.new_grad_weight() if ctx.main_grad is None else ctx.main_grad
        part = lambda x, rows: None if x is None else x[rows]
        reductions = []
        for rows in head.chunks():
            logits = head.logits(rows)
            row_entropy = entropy[rows] if entropy is not None else logits.new_zeros(len(logits))
            softmax = Softmax(
                logits,
                part(shift, rows),
                *local_columns(head.local_targets[rows], head.num_real),
                row_entropy,
                head.num_real,
                head.temperature,
                is_log_q=False,
            )
            grads = part(grad_log_probs, rows), part(grad_entropy, rows)
            grad = head.backward(softmax, *grads, hidden[rows], grad_weight, with_hidden=wants_hidden)
            if wants_hidden:
                grad_hidden[rows] = grad
                if head.group is not None:
                    reductions.append(dist.all_reduce(grad_hidden[rows], group=head.group, async_op=True))
        for reduction in reductions:
            reduction.wait()
        grad_weight = (
            None if grad_weight is None or ctx.main_grad is not None else grad_weight.to(weight.dtype)
        )
        return grad_hidden, grad_weight, *[None] * 6


def _chunks(head: LinearHead, with_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log-probs and entropies from logits, a chunk of rows at a time. Returns (log_probs [N], entropy
    [N] or None, `Softmax.shift` of all rows)."""
    parts = [head.softmax(rows, with_entropy) for rows in head.chunks()]
    if not parts:
        nothing = torch.empty(0, dtype=head.dtype, device=head.hidden.device)
        return nothing, nothing if with_entropy else None, None
    log_probs, entropy, softmaxes = zip(*parts, strict=True)
    together = lambda tensors: None if tensors[0] is None else torch.cat(tensors)
    return together(log_probs), together(entropy), together([softmax.shift for softmax in softmaxes])


def _tiles(head: LinearHead, with_entropy: bool, tiles: Tiles) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs and entropies by the Triton kernel. Returns (log_probs [N], entropy [N] or None)."""
    from megarl.kernels import linear_log_probs_triton

    targets, is_local = local_columns(head.local_targets, head.num_real)
    log_probs, entropy, m, log_s = linear_log_probs_triton.linear_stats(
        head.hidden, head.weight[: head.num_real], targets, head.temperature, with_entropy, tiles
    )
    if head.group is not None:
        log_probs, entropy, _ = merge_ranks(log_probs, entropy, m + log_s, is_local, with_entropy, head.group)
    # The target's logit is a product of its own, which may round above that of the tile.
    log_probs = nan_outside(log_probs, head.targets, head.vocab_size).clamp(max=0)
    return log_probs, entropy if with_entropy else None


def _fastest_tiles(head: LinearHead, with_entropy: bool) -> Tiles | None:
    """Return the tiles with which the Triton kernel is fastest, or None if chunks are faster. Measured the
    first time a shape occurs, on its own inputs. Ranks of a group agree, or their collectives would not
    match."""
    if not runs_triton(head.hidden):
        return None
    from megarl.kernels import linear_log_probs_triton

    # Nothing that ranks of a group differ in, such as their share of padding: either all of them have
    # measured already, or none.
    layout = [(x.stride(), x.data_ptr() % 16) for x in (head.hidden, head.weight)]
    rows = max(len(head.hidden) - 1, 0).bit_length()
    key = (
        head.hidden.device,
        head.hidden.dtype,
        rows,
        head.weight.shape,
        head.vocab_size,
        with_entropy,
        head.group,
        *layout,
    )
    if key not in _measured:
        group, head.group = head.group, None
        choices = (None, *linear_log_probs_triton.tiles_of(head.hidden.device))
        seconds = [1.0] + [math.inf] * (len(choices) - 1)
        if len(head.hidden) and head.num_real and linear_log_probs_triton.can_run(head.hidden, head.weight):
            # Triton's interpreter is never faster: there, what can run does.
            seconds = [
                _seconds(head, with_entropy, tiles) if head.hidden.is_cuda else float(tiles is None)
                for tiles in choices
            ]
        head.group, slowest = group, torch.tensor(seconds, device=head.hidden.device)
        if group is not None:
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        _measured[key] = choices[int(slowest.argmin())]
    return _measured[key]


def _seconds(head: LinearHead, with_entropy: bool, tiles: Tiles | None) -> float:
    """Return the seconds of the fastest of three runs with tiles, or in chunks if None, after one run to
    compile and warm up."""
    function = lambda: _chunks(head, with_entropy) if tiles is None else _tiles(head, with_entropy, tiles)
    function()
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize(head.hidden.device)
        start = time.perf_counter()
        function()
        torch.cuda.synchronize(head.hidden.device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)

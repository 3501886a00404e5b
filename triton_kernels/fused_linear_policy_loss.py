"""Output layer, log-probs, loss and all their gradients in one forward pass, without logits [N, V] and
without recomputation.

    logits = hidden weight^T / temperature        log_probs, entropy = of the targets under softmax(logits)
    loss   = sum over chunks of rows of loss_fn(log_probs[rows], entropy[rows], rows)

In reinforcement learning everything but the log-probs is known before the forward pass: advantages, old
log-probs, token weights, normalisers. So the gradients g = dL/dlog_prob and h = dL/dentropy of a chunk exist
as soon as its logits do, while these are still there, and the backward products follow at once:

    dlogits = (g (1[j = target] - p_j) - h p_j (log p_j + entropy)) / temperature
    dhidden = dlogits weight           dweight += dlogits^T hidden

6 N V_tp H FLOPs, three matrix products, where recomputing the logits in the backward pass takes 8. Rows with
g = h = 0 (masked, clipped, of groups without an advantage) are left out of the last two products: that saves
up to two thirds.

Memory: a buffer of logits for one chunk (see linear_head.py), dhidden, and dweight in fp32 unless it goes
into `main_grad`; with a teacher also its logits of a chunk. Plain PyTorch holds five [N, V_tp] tensors. The
gradient in the forward pass is Liger's fused_linear_cross_entropy (arXiv:2410.10989); that of a loss over
tokens, with entropy and the vocabulary split over ranks, is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.kernels.divergence import Teacher
from megarl.kernels.linear_head import LinearHead, check_head, check_main_grad
from megarl.kernels.log_probs import Softmax, vocab_parallel_log_probs_ref

TokenLoss = Callable[[Tensor, Tensor | None, slice], tuple[Tensor, dict[str, Tensor]]]
"""(log_probs [C], entropy [C] or None, which of the N rows) -> (loss, metrics), differentiable in its first
two arguments. With a teacher the second one is the divergence from it, and the loss depends on no other.

The loss must be a sum over tokens: called for any split of the rows, its values must add up to the same
loss."""


class FusedLoss(NamedTuple):
    loss: Tensor
    """Scalar; backward reaches hidden and weight."""
    log_probs: Tensor
    """[N], detached."""
    metrics: list[dict[str, Tensor]]
    """The metrics that loss_fn returned for each chunk, detached, for the caller to combine. One for no
    rows."""


def fused_linear_policy_loss_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: TokenLoss,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    dtype: torch.dtype = torch.float64,
) -> FusedLoss:
    """Specification of `fused_linear_policy_loss` for tests, with the unsplit weight [V, H], computed in
    `dtype` and differentiated by autograd."""
    logits = hidden.to(dtype) @ weight.to(dtype).t()
    log_probs, entropy = vocab_parallel_log_probs_ref(
        logits, targets, vocab_size=vocab_size, temperature=temperature, dtype=dtype
    )
    loss, metrics = loss_fn(log_probs, entropy if with_entropy else None, slice(0, len(hidden)))
    return FusedLoss(loss, log_probs.detach(), [metrics])


def fused_linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: TokenLoss,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    main_grad: Tensor | None = None,
    loss_scale: float = 1.0,
    teacher: Teacher | None = None,
) -> FusedLoss:
    """Return the loss of the targets' log-probs and compute its gradients in the same pass. A collective of
    `group`, forward only.

    Args:
        hidden: [N, H] bf16, fp16, fp32 or fp64, the same on every rank. Its gradient comes back summed over
            ranks.
        weight: [V_tp, H] like hidden; this rank's rows [rank * V_tp, (rank + 1) * V_tp) of the padded output
            layer, all finite.
        targets: [N] int64 global token ids.
        loss_fn: a sum over tokens, see `TokenLoss`. It must give the same values on every rank of `group`.
        vocab_size: real tokens. Rows of the weight from there on are padding: probability 0, gradient 0.
        group: the tensor-parallel group. None (or a group of one): `weight` is the whole vocabulary.
        temperature: what the logits are divided by; the sampler's.
        with_entropy: give loss_fn the entropies; costs a pass over the logits.
        main_grad: [V_tp, H] fp32 (fp64 for fp64). The weight's gradient is added to it in the forward pass,
            and `weight` itself gets None in backward. None: backward returns it, rounded to the weight's
            dtype once.
        loss_scale: with `main_grad`, what backward will be started with: dL/dloss. (Without, backward takes
            what comes.)
        teacher: what `divergence.py` compares with; then there are no entropies.

    Returns: see `FusedLoss`. log_probs are bitwise those of `linear_log_probs(..., method="chunked")` of the
        same rows. Without autograd the loss alone is computed and main_grad left as it is.

    Raises:
        ValueError: wrong shape, dtype or vocab_size; a target outside [0, vocab_size) on CPU (elsewhere its
            log-prob is NaN).
        RuntimeError: in a second backward; on CPU, in a backward that does not start with `loss_scale`.
    """
    check_head(hidden, weight, targets, vocab_size, group, temperature)
    check_main_grad(main_grad, weight)
    wants_hidden, wants_weight = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    with torch.no_grad():
        head = LinearHead(hidden, weight, targets, vocab_size, group, temperature)
        grad_hidden = torch.zeros_like(head.hidden) if wants_hidden else None
        grad_weight = None
        if wants_weight:
            grad_weight = head.new_grad_weight() if main_grad is None else main_grad
        log_probs = torch.empty(len(hidden), dtype=head.dtype, device=hidden.device)
        losses, metrics, reductions = [], [], []
        for rows in head.chunks():
            log_probs[rows], entropy, softmax = head.softmax(rows, with_entropy)
            of_divergence = None
            if teacher is not None:
                entropy, of_divergence = teacher.compare(rows, softmax, head.group)
            loss, chunk_metrics, grads = _differentiate(loss_fn, log_probs[rows], entropy, rows)
            losses.append(loss)
            metrics.append(chunk_metrics)
            if (wants_hidden or wants_weight) and grads is not None:
                if main_grad is not None:
                    grads = [None if g is None else g * loss_scale for g in grads]
                if of_divergence is None:
                    _backward(head, softmax, grads, rows, grad_hidden, grad_weight)
                else:
                    dlogits = of_divergence.mul_(grads[1][:, None])
                    part = head.products(dlogits, head.hidden[rows], grad_weight, wants_hidden)
                    if wants_hidden:
                        grad_hidden[rows] = part
                if head.group is not None and wants_hidden:
                    reductions.append(dist.all_reduce(grad_hidden[rows], group=head.group, async_op=True))
        if not losses:
            nothing = log_probs.new_zeros(0)
            loss, chunk_metrics, _ = _differentiate(
                loss_fn, nothing, nothing if with_entropy or teacher else None, slice(0, 0)
            )
            losses, metrics = [loss], [chunk_metrics]
        for reduction in reductions:
            reduction.wait()
        loss = torch.stack(losses).sum()
        if main_grad is None:
            grad_weight, loss_scale = None if grad_weight is None else grad_weight.to(weight.dtype), None
        else:
            grad_weight = None
    if wants_hidden or wants_weight:
        loss = _WithGradients.apply(hidden, weight, loss, grad_hidden, grad_weight, loss_scale)
    return FusedLoss(loss, log_probs, metrics)


def _differentiate(
    loss_fn: TokenLoss, log_probs: Tensor, entropy: Tensor | None, rows: slice
) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None] | None]:
    """Return (loss, metrics, [dL/dlog_probs, dL/dentropy]), the last None where the loss depends on
    neither."""
    inputs = [x.detach().requires_grad_() for x in (log_probs, entropy) if x is not None]
    with torch.enable_grad():
        loss, metrics = loss_fn(inputs[0], inputs[1] if entropy is not None else None, rows)
    grads = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else (None, None)
    grads = [*grads, None][:2]
    metrics = {name: value.detach() for name, value in metrics.items()}
    return loss.detach(), metrics, None if grads[0] is None and grads[1] is None else grads


def _backward(
    head: LinearHead,
    softmax: Softmax,
    grads: list[Tensor | None],
    rows: slice,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    """Write a chunk's gradient into its rows of `grad_hidden` and add it to `grad_weight`, only for rows that
    have a gradient."""
    grad_log_probs, grad_entropy = grads
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(grad_entropy)
    has_gradient = grad_log_probs != 0
    if grad_entropy is not None:
        has_gradient |= grad_entropy != 0
    active, hidden = has_gradient.nonzero()[:, 0], head.hidden[rows]
    if len(active) == 0:
        return
    everything = len(active) == len(hidden)
    if not everything:
        select = lambda x: None if x is None else x.index_select(0, active)
        softmax = softmax._replace(
            **{
                name: select(getattr(softmax, name))
                for name in ("kept", "shift", "targets", "is_local", "entropy")
            }
        )
        grad_log_probs, grad_entropy, hidden = select(grad_log_probs), select(grad_entropy), select(hidden)
    part = head.backward(
        softmax, grad_log_probs, grad_entropy, hidden, grad_weight, with_hidden=grad_hidden is not None
    )
    if grad_hidden is not None:
        grad_hidden[rows if everything else active + rows.start] = part


class _WithGradients(torch.autograd.Function):
    """Autograd function that returns the loss, and in backward the gradients that were computed before."""

    @staticmethod
    def forward(ctx, hidden, weight, loss, grad_hidden, grad_weight, loss_scale):
        ctx.gradients, ctx.loss_scale = (grad_hidden, grad_weight), loss_scale
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        if ctx.gradients is None:
            raise RuntimeError(
                "fused_linear_policy_loss: backward can run once, its gradients are given away"
            )
        # Not saved tensors: whoever gets these may keep them, without a copy.
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        scale = grad_loss
        if ctx.loss_scale is not None:
            if grad_loss.device.type == "cpu" and grad_loss.item() != ctx.loss_scale:
                raise RuntimeError(
                    f"fused_linear_policy_loss: backward started with {grad_loss.item()}, but "
                    "main_grad was given a gradient scaled by "
                    f"loss_scale ({ctx.loss_scale}). Pass loss_scale={grad_loss.item()}."
                )
            scale = grad_loss / ctx.loss_scale
        for gradient in (grad_hidden, grad_weight):
            if gradient is not None and (scale.is_cuda or scale.item() != 1):
                gradient.mul_(scale)
        return grad_hidden, grad_weight, *[None] * 4

"""The output layer and its softmax, a chunk of rows at a time. `linear_log_probs` and
`fused_linear_policy_loss` both use it.

    logits = hidden weight^T      [C, V_tp] fp32: one buffer that every chunk of C rows overwrites
    dhidden = dlogits weight,     dweight += dlogits^T hidden

Logits are fp32 whatever the inputs are: rounded to bf16 they would move log-probs by 1e-2 on average, which
is more than a policy moves in a step. The products of bf16 inputs are exact in fp32, so on CUDA this costs
bandwidth, not precision or FLOPs (`out_dtype`). PyTorch's CPU matrix product has no such output: there the
logits of bf16 inputs are rounded to bf16.

Both products of the backward pass take bf16 dlogits on CUDA and add up in fp32, as far as their results:
dweight is fp32, dhidden is rounded to bf16 once.

Memory: C V_tp 4 bytes, 6 with the bf16 gradient on CUDA and there also C H 4, and nothing that grows with
N V.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.kernels.checks import check_targets
from megarl.kernels.log_probs import (
    Softmax,
    nan_outside,
    rank_in,
    runs_triton,
    softmax_gradient,
    softmax_rows,
)

# CPU: enough rows that the matrix products run at full speed and dweight, read and written once per chunk,
# costs little beside them.
_CHUNK_ELEMENTS_CPU, _MIN_ROWS_CPU = 2**23, 256
# CUDA: 2.5 GiB of logits, and at least what keeps the accumulation of dweight compute bound (660 rows on an
# H200).
_CHUNK_BYTES_CUDA, _MIN_ROWS_CUDA, _MAX_ROWS_CUDA = 5 * 2**29, 1024, 8192


def check_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    temperature: float,
) -> None:
    """Raise ValueError if shapes, dtypes or devices of an op's arguments do not fit its output layer, or a
    target is no token."""
    if hidden.ndim != 2 or hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(
            f"hidden must be a bf16, fp16, fp32 or fp64 tensor [N, H], got {hidden.dtype} "
            f"{list(hidden.shape)}"
        )
    if (
        weight.ndim != 2
        or weight.shape[1] != hidden.shape[1]
        or weight.dtype != hidden.dtype
        or weight.device != hidden.device
    ):
        raise ValueError(
            f"weight must be {hidden.dtype} [V_tp, {hidden.shape[1]}] on {hidden.device} like hidden, "
            f"got {weight.dtype} {list(weight.shape)} on {weight.device}"
        )
    num_columns = len(weight) * rank_in(group)[1]
    check_targets(targets, hidden, "hidden", vocab_size, num_columns, temperature)


def check_main_grad(main_grad: Tensor | None, weight: Tensor) -> None:
    """Raise ValueError unless `main_grad` is None or has the shape, device and accumulation dtype for the
    gradient of `weight`."""
    if main_grad is None:
        return
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    if main_grad.shape != weight.shape or main_grad.dtype != dtype or main_grad.device != weight.device:
        raise ValueError(
            f"main_grad must be {dtype} {list(weight.shape)} on {weight.device} like weight, "
            f"got {main_grad.dtype} {list(main_grad.shape)} on {main_grad.device}"
        )


class LinearHead:
    """The output layer of one call, with checked hidden states [N, H], weight [V_tp, H] and targets [N].
    Records no gradient."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
    ):
        rank, num_ranks = rank_in(group)
        self.vocab_size = vocab_size
        self.hidden, self.weight, self.temperature = hidden.detach(), weight.detach(), float(temperature)
        self.group = group if num_ranks > 1 and len(hidden) else None
        self.targets = targets
        self.local_targets = targets - rank * len(weight)
        self.num_real = min(max(vocab_size - rank * len(weight), 0), len(weight))
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self._logits: Tensor | None = None
        self._low_precision: Tensor | None = None

    @property
    def rows_per_chunk(self) -> int:
        """Number of rows of a chunk. It depends on nothing but V_tp and the device: equal rows make equal
        chunks, and equal bits, in every function."""
        num_columns = len(self.weight)
        if self.hidden.device.type == "cpu":
            return max(_CHUNK_ELEMENTS_CPU // num_columns, _MIN_ROWS_CPU)
        rows = _CHUNK_BYTES_CUDA // (4 * num_columns) // 128 * 128
        return min(max(rows, _MIN_ROWS_CUDA), _MAX_ROWS_CUDA)

    def chunks(self) -> Iterator[slice]:
        """Yield the chunks of the N rows, in order; none without rows."""
        for first in range(0, len(self.hidden), self.rows_per_chunk):
            yield slice(first, min(first + self.rows_per_chunk, len(self.hidden)))

    def logits(self, rows: slice) -> Tensor:
        """Return the logits of a chunk, [C, V_tp] in `dtype`, overwritten by the next chunk."""
        if self._logits is None:
            num_rows = min(self.rows_per_chunk, len(self.hidden))
            self._logits = torch.empty(
                num_rows, len(self.weight), dtype=self.dtype, device=self.hidden.device
            )
        out, hidden, weight = self._logits[: rows.stop - rows.start], self.hidden[rows], self.weight.t()
        if hidden.dtype == self.dtype:
            return torch.mm(hidden, weight, out=out)
        if hidden.is_cuda:
            return torch.mm(hidden, weight, out_dtype=self.dtype, out=out)
        return out.copy_(hidden @ weight)

    def softmax(self, rows: slice, with_entropy: bool) -> tuple[Tensor, Tensor | None, Softmax]:
        """Return (log_probs, entropy or None, state for `backward`) of a chunk. A collective of the group."""
        logits = self.logits(rows)
        log_probs, entropy, softmax = softmax_rows(
            logits,
            self.local_targets[rows],
            num_real=self.num_real,
            group=self.group,
            temperature=self.temperature,
            with_entropy=with_entropy,
            log_q=None if runs_triton(logits) else logits,
        )
        return nan_outside(log_probs, self.targets[rows], self.vocab_size), entropy, softmax

    def backward(
        self,
        softmax: Softmax,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
        hidden: Tensor,
        grad_weight: Tensor | None,
        with_hidden: bool,
    ) -> Tensor | None:
        """Add the chunk's gradient to `grad_weight` [V_tp, H] and return that of `hidden` [C, H], of this
        rank's columns only.

        `softmax` and `hidden` are of the same C rows. None for `grad_weight`, False for `with_hidden`: not
        wanted."""
        dlogits = softmax_gradient(softmax, grad_log_probs, grad_entropy, self._gradient_buffer(softmax.kept))
        return self.products(dlogits, hidden, grad_weight, with_hidden)

    def products(
        self, dlogits: Tensor, hidden: Tensor, grad_weight: Tensor | None, with_hidden: bool
    ) -> Tensor | None:
        """Do what `backward` does, given the gradient of the logits [C, V_tp]."""
        if grad_weight is not None:
            if hidden.is_cuda and hidden.dtype != grad_weight.dtype:
                dlogits = dlogits.to(hidden.dtype)
                torch.addmm(grad_weight, dlogits.t(), hidden, out_dtype=grad_weight.dtype, out=grad_weight)
            else:
                torch.addmm(grad_weight, dlogits.t(), hidden.to(grad_weight.dtype), out=grad_weight)
        if not with_hidden:
            return None
        dlogits = dlogits.to(hidden.dtype)
        if hidden.is_cuda and hidden.dtype != self.dtype:
            # cuBLAS may split the sum over the vocabulary and add its parts in the dtype of the result.
            return torch.mm(dlogits, self.weight, out_dtype=self.dtype).to(hidden.dtype)
        return dlogits @ self.weight

    def _gradient_buffer(self, kept: Tensor) -> Tensor:
        """Return the buffer for dlogits: the logits, or a bf16 buffer for CUDA's bf16 matrix products."""
        if self.hidden.dtype == self.dtype or not self.hidden.is_cuda:
            return kept
        if self._low_precision is None:
            self._low_precision = torch.empty_like(self._logits, dtype=self.hidden.dtype)
        return self._low_precision[: len(kept)]

    def new_grad_weight(self) -> Tensor:
        return torch.zeros_like(self.weight, dtype=self.dtype)

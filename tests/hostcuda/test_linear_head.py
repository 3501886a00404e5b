"""The output layer in bf16 on a CUDA device: each matrix product adds up in fp32, and gradients agree with
float64.

make test-hostcuda ARGS=tests/hostcuda/test_linear_head.py"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.kernels.fused_linear_policy_loss import fused_linear_policy_loss, fused_linear_policy_loss_ref
from megarl.kernels.linear_log_probs import linear_log_probs

NUM_TOKENS, NUM_HIDDEN, VOCAB_SIZE = 300, 64, 2003


class Products(TorchDispatchMode):
    """Dtypes of the results of all matrix products."""

    def __enter__(self):
        self.dtypes = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes.append(out.dtype)
        return out


def make_inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, NUM_HIDDEN, generator=generator)
    weight = torch.randn(VOCAB_SIZE, NUM_HIDDEN, generator=generator) * 3 / NUM_HIDDEN**0.5
    targets = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    scores = torch.randn(NUM_TOKENS, generator=generator)
    return hidden.bfloat16(), weight.bfloat16(), targets, scores


@pytest.mark.parametrize("op", ["fused", "recomputed", "main_grad"])
def test_backward_products_take_bf16_and_add_up_in_fp32(op):
    """Relative Frobenius error 5e-3: a rounding of dlogits and one of the result to bf16, 2**-9 each."""
    inputs = make_inputs()
    *wide, wide_targets, wide_scores = (x.double() if x.is_floating_point() else x for x in inputs)
    wide = [x.requires_grad_() for x in wide]
    loss = lambda scores: (
        lambda log_probs, entropy, rows: (
            (scores[rows] * (log_probs + 0.1 * entropy)).sum(),
            {},
        )
    )
    fused_linear_policy_loss_ref(
        *wide, wide_targets, loss(wide_scores), vocab_size=VOCAB_SIZE, with_entropy=True
    ).loss.backward()
    hidden, weight, targets, scores = (x.cuda() for x in inputs)
    hidden.requires_grad_(), weight.requires_grad_()
    main_grad = torch.zeros(weight.shape, device="cuda") if op == "main_grad" else None
    arguments = dict(vocab_size=VOCAB_SIZE, with_entropy=True, main_grad=main_grad)
    with Products() as products:
        if op == "recomputed":
            log_probs, entropy = linear_log_probs(hidden, weight, targets, **arguments)
            value, _ = loss(scores)(log_probs, entropy, slice(None))
        else:
            value = fused_linear_policy_loss(hidden, weight, targets, loss(scores), **arguments).loss
        value.backward()
    # The logits (again in the backward pass where they are recomputed), dhidden and dweight.
    assert products.dtypes == [torch.float32] * (4 if op == "recomputed" else 3)
    grad_weight = weight.grad if main_grad is None else main_grad
    assert hidden.grad.dtype == torch.bfloat16 and (main_grad is None or weight.grad is None)
    for got, expected in ((hidden.grad, wide[0].grad), (grad_weight, wide[1].grad)):
        assert (got.cpu().double() - expected).norm() <= 5e-3 * expected.norm()

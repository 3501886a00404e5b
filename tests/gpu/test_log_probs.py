"""tests/kernels/test_log_probs.py on a GPU: `pytest tests/gpu/test_log_probs.py`."""

import torch

from megarl.kernels.log_probs import vocab_parallel_log_probs
from tests.kernels.test_log_probs import *  # noqa: F403


def test_inplace_gives_the_gradient_in_the_memory_of_the_logits(kernels):
    """Takes over its namesake, which would see the memory of what the door was given before it went to the
    GPU."""
    product = (
        torch.ones((), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        * torch.randn(8, 300, device="cuda").bfloat16()
    )
    targets = torch.arange(8, device="cuda")
    (expected,) = torch.autograd.grad(
        vocab_parallel_log_probs(product, targets, vocab_size=300)[0].sum(), product
    )
    (gradient,) = torch.autograd.grad(
        vocab_parallel_log_probs(product, targets, vocab_size=300, inplace=True)[0].sum(), product
    )
    assert gradient.data_ptr() == product.data_ptr() and torch.equal(gradient, expected)

"""The output layer's kernels, compiled: the tests of tests/kernels that take `kernels`, and the sizes and
dtypes that only a GPU can do.

bf16 bounds: log-probs 1e-3 and entropies 2e-3 against float64 on the same bf16 inputs, since products of bf16
are exact in fp32 and only their sum is rounded; gradients relative Frobenius 5e-3, one rounding of dlogits
and one of the result to bf16.
"""

import pytest
import torch

from megarl.kernels.fused_linear_policy_loss import fused_linear_policy_loss
from megarl.kernels.linear_log_probs import linear_log_probs, linear_log_probs_ref
from megarl.kernels.log_probs import vocab_parallel_log_probs
from tests.kernels.test_fused_linear_policy_loss import (  # noqa: F401
    test_log_probs_are_bitwise_those_of_linear_log_probs,
    test_loss_and_gradients_against_fp64,
    test_twice_the_same_bits,
)
from tests.kernels.test_linear_log_probs import test_no_tokens, test_values_and_gradients_against_fp64  # noqa: F401

pytestmark = pytest.mark.real_gpu


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def bf16_case(num_tokens, num_hidden, vocab_size):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(num_tokens, num_hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = (
        torch.randn(vocab_size, num_hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
        * 3
        / num_hidden**0.5
    )
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator, device="cuda")
    targets[:1], targets[-1:] = 0, vocab_size - 1
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("method", ["fastest", "chunked"])
@pytest.mark.parametrize(
    "num_tokens, num_hidden, vocab_size", [(1, 128, 1500), (300, 256, 32003), (700, 896, 151936)]
)
def test_bf16_log_probs_and_gradients(cuda, num_tokens, num_hidden, vocab_size, method):
    hidden, weight, targets = bf16_case(num_tokens, num_hidden, vocab_size)
    log_probs, entropy = linear_log_probs(
        hidden, weight, targets, vocab_size=vocab_size, with_entropy=True, method=method
    )
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = linear_log_probs_ref(*wide, targets, vocab_size=vocab_size)
    assert (log_probs - expected[0]).abs().max() <= 1e-3 and (entropy - expected[1]).abs().max() <= 2e-3
    cotangents = torch.randn(2, num_tokens, device="cuda")
    torch.autograd.backward((log_probs, entropy), list(cotangents))
    torch.autograd.backward(expected, [c.double() for c in cotangents])
    for got, wanted in zip((hidden.grad, weight.grad), (x.grad for x in wide)):
        assert (got.double() - wanted).norm() <= 5e-3 * wanted.norm()


def test_tiles_are_what_the_chunks_are(cuda):
    """All that are tried on this GPU, whatever is faster."""
    from megarl.kernels import linear_log_probs as module
    from megarl.kernels.linear_head import LinearHead
    from megarl.kernels.linear_log_probs_triton import tiles_of

    hidden, weight, targets = bf16_case(1000, 512, 50001)
    with torch.no_grad():
        head = LinearHead(hidden, weight, targets, 50001, None, 0.8)
        chunks = module._chunks(head, True)[:2]
        for tiles in tiles_of(hidden.device):
            for actual, expected in zip(module._tiles(head, True, tiles), chunks, strict=True):
                torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


def test_fused_bf16_accumulates_into_main_grad(cuda):
    hidden, weight, targets = bf16_case(3000, 256, 32003)
    old = linear_log_probs(hidden.detach(), weight.detach(), targets, vocab_size=32003, method="chunked")[0]
    main_grad = torch.ones(weight.shape, device="cuda")
    scores = torch.randn(3000, device="cuda")
    loss = lambda log_probs, entropy, rows: ((scores[rows] * (log_probs - entropy)).sum(), {})
    fused = fused_linear_policy_loss(
        hidden, weight, targets, loss, vocab_size=32003, with_entropy=True, main_grad=main_grad
    )
    fused.loss.backward()
    assert torch.equal(fused.log_probs, old) and weight.grad is None
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss(*linear_log_probs_ref(*wide, targets, vocab_size=32003), slice(0, 3000))[0].backward()
    for got, wanted in zip((hidden.grad, main_grad - 1), (x.grad for x in wide)):
        assert (got.double() - wanted).norm() <= 5e-3 * wanted.norm()


def test_more_than_2_to_the_31_logits(cuda):
    """Row offsets beyond int32: the last rows must be those of a small tensor."""
    num_columns, num_tokens = 2**18, 2**13 + 8
    logits = torch.zeros(num_tokens, num_columns, device="cuda", dtype=torch.bfloat16)
    logits[-8:] = torch.randn(8, num_columns, device="cuda")
    targets = torch.arange(num_tokens, device="cuda")
    small = logits[-8:].clone().requires_grad_()
    expected = vocab_parallel_log_probs(small, targets[-8:], vocab_size=num_columns)[0]
    log_probs = vocab_parallel_log_probs(logits.requires_grad_(), targets, vocab_size=num_columns)[0]
    log_probs.sum().backward()
    expected.sum().backward()
    assert torch.equal(log_probs[-8:], expected) and torch.equal(logits.grad[-8:], small.grad)

"""SFT against torch.nn.functional.cross_entropy over the whole mini-batch, whole and split."""

import torch

from megarl.algorithms import SFT, LossInputs


def inputs(log_probs, num_tokens):
    lengths = torch.ones(len(log_probs), dtype=torch.int64)
    return LossInputs(
        log_probs=log_probs,
        response_lengths=lengths,
        num_tokens=num_tokens,
        num_sequences=1,
        max_response_length=9,
        kl_coef=0.0,
    )


def test_equals_cross_entropy_however_it_is_split():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, 13, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 13, (11,), generator=generator)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    for sizes in ([11], [4, 0, 7], [1] * 11):
        log_probs = torch.log_softmax(logits, -1)[torch.arange(11), targets]
        shares = [SFT().loss(inputs(part, 11)) for part in log_probs.split(sizes)]
        loss = sum(share for share, _ in shares)
        torch.testing.assert_close(loss, expected, atol=1e-14, rtol=0)
        torch.testing.assert_close(
            torch.autograd.grad(loss, logits)[0], expected_gradient, atol=1e-15, rtol=0
        )
        assert [set(metrics) for _, metrics in shares] == [{"policy/loss"}] * len(sizes)
        assert sum(metrics["policy/loss"] for _, metrics in shares) == loss.detach()
        assert not shares[0][1]["policy/loss"].requires_grad


def test_has_no_advantages():
    try:
        SFT().compute_advantages(None)
    except NotImplementedError as error:
        assert "SFT has no advantages" in str(error)
    else:
        raise AssertionError("SFT gave advantages")

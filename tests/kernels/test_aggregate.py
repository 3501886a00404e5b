"""`token_weights` against its specification, and what each mode means. Bound: one rounding of 1/n, one of n
in fp32."""

from typing import get_args

import pytest
import torch

from megarl.kernels.aggregate import LossAggregation, token_weights, token_weights_ref

LENGTHS = [3, 1, 7, 2]
PER_TOKEN = torch.repeat_interleave(torch.tensor(LENGTHS), torch.tensor(LENGTHS))
COUNTS = dict(num_tokens=sum(LENGTHS), num_sequences=len(LENGTHS), max_response_length=16)


@pytest.mark.parametrize("mode", get_args(LossAggregation))
@pytest.mark.parametrize(
    "counts", [COUNTS, dict(num_tokens=10**6 + 1, num_sequences=1023, max_response_length=32768)]
)
def test_against_the_specification(mode, counts):
    actual = token_weights(mode, PER_TOKEN, **counts)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        actual.double(), token_weights_ref(mode, PER_TOKEN, **counts), rtol=1.2e-7, atol=0
    )
    assert token_weights(mode, PER_TOKEN[:0], **counts).shape == (0,)


@pytest.mark.parametrize(
    "mode, expected",
    [("token-mean", 1.0), ("seq-mean-token-mean", 1.0), ("seq-mean-token-sum", 13 / 4), ("dr-grpo", 13 / 64)],
)
def test_what_a_loss_of_one_everywhere_becomes(mode, expected):
    assert token_weights(mode, PER_TOKEN, **COUNTS).sum().item() == pytest.approx(expected, rel=1e-6)


def test_what_each_sequence_counts():
    shares = {
        mode: [w.sum().item() for w in token_weights(mode, PER_TOKEN, **COUNTS).split(LENGTHS)]
        for mode in get_args(LossAggregation)
    }
    assert shares["seq-mean-token-mean"] == pytest.approx([1 / 4] * 4)
    assert shares["token-mean"] == pytest.approx([length / 13 for length in LENGTHS])
    assert shares["dr-grpo"] == pytest.approx([share / 16 for share in shares["seq-mean-token-sum"]])


@pytest.mark.parametrize(
    "mode, change, message",
    [
        ("token-mean", dict(num_tokens=0), r"num_tokens \(0\) must be at least 1"),
        ("dr-grpo", dict(max_response_length=-1), r"max_response_length \(-1\)"),
        (
            "mean",
            {},
            r"mode \('mean'\) must be one of token-mean, seq-mean-token-mean, seq-mean-token-sum, dr-grpo",
        ),
    ],
)
def test_errors_name_the_value(mode, change, message):
    with pytest.raises(ValueError, match=message):
        token_weights(mode, PER_TOKEN, **(COUNTS | change))

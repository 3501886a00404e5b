"""What `fused_linear_policy_loss` and `linear_log_probs` need from forward to backward: of what grows with
the number of tokens, one gradient [N, H] and a few numbers per token; of what has a vocabulary in its shape,
the buffers of one chunk and the weight's gradient.

Bytes are counted as tensors come and go (`PeakBytes`), not measured, so these numbers are the same on every
machine. tools/benchmarks/head_memory.py measures processes."""

import pytest
import torch

from megarl.kernels import aot, linear_head, log_probs
from megarl.kernels.fused_linear_policy_loss import fused_linear_policy_loss, fused_linear_policy_loss_ref
from megarl.kernels.linear_log_probs import linear_log_probs
from tests.kernels.linear_cases import PeakBytes, make_case

NUM_HIDDEN, VOCAB_SIZE, ROWS_PER_CHUNK = 8, 1000, 10
OPTIONS = dict(vocab_size=VOCAB_SIZE, with_entropy=True)
CHUNK_BYTES = 4 * ROWS_PER_CHUNK * VOCAB_SIZE


def loss_of_tokens(log_probs, entropy, rows):
    """Every third token has no gradient: what is left out of the backward products is copied, a chunk at a
    time."""
    weights = torch.arange(rows.start, rows.stop).remainder(3).to(log_probs.dtype)
    return (weights * (entropy - log_probs)).sum(), {}


def fused(hidden, weight, targets):
    return fused_linear_policy_loss(hidden, weight, targets, loss_of_tokens, **OPTIONS).loss


def recomputed(hidden, weight, targets):
    return loss_of_tokens(*linear_log_probs(hidden, weight, targets, **OPTIONS), slice(0, len(hidden)))[0]


def naive(hidden, weight, targets):
    return fused_linear_policy_loss_ref(
        hidden, weight, targets, loss_of_tokens, dtype=torch.float32, **OPTIONS
    ).loss


def peak_bytes(function, num_tokens, dtype):
    hidden, weight, targets, _ = make_case(num_tokens, NUM_HIDDEN, VOCAB_SIZE, dtype=dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    with PeakBytes() as memory:
        function(hidden, weight, targets).backward()
    return memory.peak


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=str
)
@pytest.mark.parametrize("function", [fused, recomputed])
def test_no_logits_of_all_tokens(monkeypatch, kernels, function, dtype):
    monkeypatch.setattr(linear_head, "_CHUNK_ELEMENTS_CPU", 1)
    monkeypatch.setattr(linear_head, "_MIN_ROWS_CPU", ROWS_PER_CHUNK)
    monkeypatch.setattr(
        log_probs, "_CHUNK_ELEMENTS_CPU", VOCAB_SIZE
    )  # rows that the softmax works on at once: one
    few, many = (peak_bytes(function, num_tokens, dtype) for num_tokens in (30, 90))
    per_token = 4 * NUM_HIDDEN + 32
    assert many - few <= 60 * per_token
    # The logits, what selects or converts some of them, and the weight's gradient (bf16: also rounded).
    assert few <= 3 * CHUNK_BYTES + 2 * 4 * VOCAB_SIZE * NUM_HIDDEN + 30 * per_token


def test_the_count_sees_what_pytorch_holds():
    few, many = (peak_bytes(naive, num_tokens, torch.float32) for num_tokens in (100, 200))
    assert many - few >= 100 * 3 * 4 * VOCAB_SIZE


def test_the_table_of_kernels_counts_each_input_once_per_launch(monkeypatch):
    """bf16 hidden states and weights are read once, and each tile of BN columns leaves two or three fp32 a row."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # other tests of this process run what is imported here
    triton = pytest.importorskip("megarl.kernels.linear_log_probs_triton")
    tiles, rows = triton.CANDIDATES[0], triton._ROWS_PER_LAUNCH
    for entropy, outputs in ((False, 2), (True, 3)):
        case = triton.aot_case_of(tiles, entropy, (90,))
        traffic = case.bytes_per_element * rows * aot.VOCAB_SIZE
        read = 2 * aot.NUM_HIDDEN * (rows + aot.VOCAB_SIZE)
        assert traffic == pytest.approx(read + 4 * outputs * rows * aot.VOCAB_SIZE / tiles.BN)

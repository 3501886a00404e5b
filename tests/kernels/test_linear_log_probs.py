"""`linear_log_probs` against its fp64 specification, on one rank; test_log_probs_tensor_parallel.py has the
others.

Bounds are twice the error of plain PyTorch (matrix product, log_softmax, autograd) in the same dtype, plus a
few units in the last place. bf16 never runs through tiles here: Triton's interpreter multiplies the raw bits
of bf16.
"""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.kernels import linear_head
from megarl.kernels.linear_log_probs import linear_log_probs, linear_log_probs_ref
from tests.kernels.linear_cases import LargestTensor, assert_at_most_twice_the_error, make_case

SHAPES = [
    (1, 8, 1, 1),
    (7, 16, 255, 255),
    (5, 40, 257, 257),
    (35, 64, 1500, 1500),
    (9, 24, 283, 320),
    (3, 8, 32003, 32003),
]
METHODS = ["fastest", "chunked"]
SCALES = [(1.0, 0.0), (0.7, -120.0), (2.5, 80.0)]
"""Temperature and shift of the logits."""


def torch_log_probs(hidden, weight, targets, vocab_size, temperature):
    log_probs = torch.log_softmax((hidden @ weight.t())[:, :vocab_size].float() / temperature, dim=-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def run(function, hidden, weight, cotangents):
    """(log_probs, entropy, gradients of hidden and weight)."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    outputs = function(hidden, weight)
    torch.autograd.backward(outputs, [c.to(o.dtype) for c, o in zip(cotangents, outputs)])
    return *(output.detach() for output in outputs), hidden.grad, weight.grad


@pytest.mark.nightly_but_one_in(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "shape, temperature, shift",
    [
        # 32,003 columns are 126 tiles; what a scale does to a tile, the smaller shapes show
        pytest.param(shape, *scale, marks=[pytest.mark.nightly] * (shape[2] > 10_000 and scale != SCALES[2]))
        for shape in SHAPES
        for scale in SCALES
    ],
    ids=str,
)
def test_values_and_gradients_against_fp64(kernels, shape, temperature, shift, method):
    num_tokens, num_hidden, vocab_size, num_columns = shape
    hidden, weight, targets, cotangents = make_case(
        num_tokens, num_hidden, vocab_size, num_columns, shift=shift
    )
    options = dict(vocab_size=vocab_size, temperature=temperature)
    actual = run(
        lambda h, w: linear_log_probs(h, w, targets, with_entropy=True, method=method, **options),
        hidden,
        weight,
        cotangents,
    )
    of_torch = run(lambda h, w: torch_log_probs(h, w, targets, **options), hidden, weight, cotangents)
    expected = run(
        lambda h, w: linear_log_probs_ref(h, w, targets, **options),
        hidden.double(),
        weight.double(),
        cotangents,
    )
    scaled = max(1, (hidden @ weight[:vocab_size].t()).abs().max().item() / temperature)
    ulps = 4 * torch.finfo(torch.float32).eps * scaled
    # A gradient is a sum of p * cotangent * weight: an error of `ulps` in log p is one of p * ulps there.
    gradient_slack = [
        ulps * cotangents.abs().max().item() / temperature * w.abs().max().item()
        for w in (weight[:vocab_size], hidden * 4)
    ]
    with torch.no_grad():  # "fastest" has tiles here
        without_autograd = linear_log_probs(
            hidden, weight, targets, with_entropy=True, method=method, **options
        )
    for got, torchs, wanted in zip(without_autograd, of_torch, expected):
        assert_at_most_twice_the_error(got, torchs, wanted, 2 * ulps)
    for got, torchs, wanted, slack in zip(actual, of_torch, expected, [ulps, 2 * ulps, *gradient_slack]):
        assert_at_most_twice_the_error(got, torchs, wanted, slack)
    assert (actual[3][vocab_size:] == 0).all()


def test_bf16_inputs(kernels):
    """On a CPU the logits are rounded to bf16, as PyTorch's are; the gradient of the weight is not rounded on
    the way."""
    hidden, weight, targets, cotangents = make_case(33, 64, 700, 704, dtype=torch.bfloat16)
    weight[700:] = 0
    options = dict(vocab_size=700, temperature=0.8)
    actual = run(
        lambda h, w: linear_log_probs(h, w, targets, with_entropy=True, **options), hidden, weight, cotangents
    )
    of_torch = run(lambda h, w: torch_log_probs(h, w, targets, **options), hidden, weight, cotangents)
    expected = run(
        lambda h, w: linear_log_probs_ref(h, w, targets, **options),
        hidden.double(),
        weight.double(),
        cotangents,
    )
    assert [x.dtype for x in actual] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    for got, torchs, wanted in zip(actual, of_torch, expected):
        error, torch_error = ((x.double() - wanted).norm() / wanted.norm() for x in (got, torchs))
        assert error <= 1.5 * torch_error


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(with_entropy):
    hidden, weight, targets, _ = make_case(5, 4, 6, 7, dtype=torch.float64)
    weight[6:] = 0
    function = lambda h, w: [
        o
        for o in linear_log_probs(h, w, targets, vocab_size=6, temperature=1.3, with_entropy=with_entropy)
        if o is not None
    ]
    assert torch.autograd.gradcheck(function, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens(kernels, method):
    """Its gradient must still reach the parameters, or data-parallel ranks wait for each other."""
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True)
    log_probs, entropy = linear_log_probs(
        hidden, weight, torch.zeros(0, dtype=torch.int64), vocab_size=5, with_entropy=True, method=method
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert (
        log_probs.shape == entropy.shape == (0,) and hidden.grad.shape == (0, 8) and (weight.grad == 0).all()
    )


@pytest.mark.parametrize("method", METHODS)
def test_non_contiguous_inputs(kernels, method):
    hidden, weight, targets, cotangents = make_case(12, 16, 300)
    function = lambda h, w: linear_log_probs(h, w, targets, vocab_size=300, with_entropy=True, method=method)
    expected = run(function, hidden, weight, cotangents)
    with torch.no_grad():
        function(hidden, weight)  # tiles can run here
    every_second = torch.stack([hidden, torch.full_like(hidden, math.nan)], 1).flatten(0, 1)[::2]
    transposed = weight.t().contiguous().t()
    assert not every_second.is_contiguous() and not transposed.is_contiguous()
    for h, w in ((every_second, weight), (hidden, transposed)):
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
        outputs = function(h, w)
        torch.autograd.backward(outputs, list(cotangents))
        with torch.no_grad():
            log_probs, entropy = function(h, w)
        for got, wanted in zip((*outputs, h.grad, w.grad, log_probs, entropy), (*expected, *expected[:2])):
            torch.testing.assert_close(
                got, wanted, atol=1e-5, rtol=1e-5
            )  # another layout, another matrix product


@pytest.mark.parametrize("method", METHODS)
def test_twice_the_same_bits(kernels, method):
    hidden, weight, targets, cotangents = make_case(40, 32, 500)
    function = lambda h, w: linear_log_probs(h, w, targets, vocab_size=500, with_entropy=True, method=method)
    first, second = (run(function, hidden, weight, cotangents) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with torch.no_grad():
        first, second = (function(hidden, weight) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("method", METHODS)
def test_chunks_and_order_of_rows_change_nothing(kernels, monkeypatch, method):
    """Up to the rounding of matrix products of other sizes."""
    hidden, weight, targets, cotangents = make_case(13, 32, 200)
    options = dict(vocab_size=200, with_entropy=True, method=method)
    expected = run(lambda h, w: linear_log_probs(h, w, targets, **options), hidden, weight, cotangents)
    monkeypatch.setattr(linear_head, "_CHUNK_ELEMENTS_CPU", 1)
    for rows_per_chunk in (1, 5, 13):
        monkeypatch.setattr(linear_head, "_MIN_ROWS_CPU", rows_per_chunk)
        if kernels == "interpret":
            monkeypatch.setattr("megarl.kernels.linear_log_probs_triton._ROWS_PER_LAUNCH", rows_per_chunk)
        actual = run(lambda h, w: linear_log_probs(h, w, targets, **options), hidden, weight, cotangents)
        with torch.no_grad():
            actual += linear_log_probs(hidden, weight, targets, **options)
        for got, wanted in zip(actual, (*expected, *expected[:2])):
            torch.testing.assert_close(got, wanted, atol=4e-6, rtol=1e-5)
    monkeypatch.undo()
    monkeypatch.setenv("MEGARL_KERNELS", kernels)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    got = run(
        lambda h, w: linear_log_probs(h, w, targets[order], **options),
        hidden[order],
        weight,
        cotangents[:, order],
    )
    for value, wanted in zip(got, (expected[0][order], expected[1][order], expected[2][order], expected[3])):
        torch.testing.assert_close(value, wanted, atol=4e-6, rtol=1e-5)


def test_flops_and_the_largest_tensor(monkeypatch):
    num_tokens, num_hidden, vocab_size = 60, 8, 100
    monkeypatch.setattr(linear_head, "_CHUNK_ELEMENTS_CPU", 1)
    monkeypatch.setattr(linear_head, "_MIN_ROWS_CPU", 10)
    hidden, weight, targets, _ = make_case(num_tokens, num_hidden, vocab_size)
    product = 2 * num_tokens * num_hidden * vocab_size
    with FlopCounterMode(display=False) as flops, LargestTensor() as largest:
        linear_log_probs(hidden, weight, targets, vocab_size=vocab_size)
    assert flops.get_total_flops() == product and largest.elements == 10 * vocab_size
    hidden.requires_grad_(), weight.requires_grad_()
    with FlopCounterMode(display=False) as flops, LargestTensor() as largest:
        linear_log_probs(hidden, weight, targets, vocab_size=vocab_size)[0].sum().backward()
    assert flops.get_total_flops() == 4 * product and largest.elements == 10 * vocab_size


def test_bf16_gradient_of_the_weight_is_rounded_once(monkeypatch):
    """Added up over all chunks in fp32, as in a main_grad of fp32."""
    monkeypatch.setattr(linear_head, "_CHUNK_ELEMENTS_CPU", 1)
    monkeypatch.setattr(linear_head, "_MIN_ROWS_CPU", 1)
    hidden, weight, targets, cotangents = make_case(64, 16, 40, dtype=torch.bfloat16)
    options, main_grad = dict(vocab_size=40, with_entropy=True), torch.zeros(40, 16)
    rounded = run(lambda h, w: linear_log_probs(h, w, targets, **options), hidden, weight, cotangents)[3]
    run(
        lambda h, w: linear_log_probs(h, w, targets, main_grad=main_grad, **options),
        hidden,
        weight,
        cotangents,
    )
    assert torch.equal(rounded, main_grad.bfloat16())


def test_main_grad_takes_the_gradient_of_the_weight():
    hidden, weight, targets, cotangents = make_case(12, 16, 50)
    expected = run(
        lambda h, w: linear_log_probs(h, w, targets, vocab_size=50, with_entropy=True),
        hidden,
        weight,
        cotangents,
    )
    main_grad, hidden, weight = torch.ones_like(weight), hidden.requires_grad_(), weight.requires_grad_()
    outputs = linear_log_probs(hidden, weight, targets, vocab_size=50, with_entropy=True, main_grad=main_grad)
    torch.autograd.backward(outputs, list(cotangents))
    assert weight.grad is None and torch.equal(hidden.grad, expected[2])
    torch.testing.assert_close(main_grad - 1, expected[3], atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(hidden=torch.zeros(2, 4, 1)), r"hidden must be .* \[N, H\], got torch.float32 \[2, 4, 1\]"),
        (dict(hidden=torch.zeros(2, 4, dtype=torch.int64)), r"hidden must be a bf16, fp16, fp32 or fp64"),
        (
            dict(weight=torch.zeros(6, 5)),
            r"weight must be torch.float32 \[V_tp, 4\] .* got torch.float32 \[6, 5\]",
        ),
        (dict(weight=torch.zeros(6, 4, dtype=torch.bfloat16)), r"weight must be torch.float32.*bfloat16"),
        (dict(targets=torch.tensor([0, 5])), r"got 5 with vocab_size \(5\)"),
        (dict(targets=torch.tensor([0])), r"int64 \[2\].*\[1\]"),
        (dict(vocab_size=7), r"vocab_size \(7\) must be in \[1, 6\]"),
        (dict(temperature=0.0), r"temperature \(0.0\)"),
        (
            dict(main_grad=torch.zeros(6, 4, dtype=torch.bfloat16)),
            r"main_grad must be torch.float32 \[6, 4\].*bfloat16",
        ),
        (dict(method="slow"), r"method \('slow'\) must be one of fastest, chunked"),
    ],
)
def test_errors_name_the_value(change, message):
    arguments = (
        dict(hidden=torch.zeros(2, 4), weight=torch.zeros(6, 4), targets=torch.tensor([0, 1]), vocab_size=5)
        | change
    )
    with pytest.raises(ValueError, match=message):
        linear_log_probs(**arguments)


@pytest.mark.parametrize("method", METHODS)
def test_no_log_prob_is_above_zero(kernels, method):
    """The target's logit of tiles is another product than the tile's, and may round above it: by 1e-4 of
    these logits of 1e3."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(250, 64, generator=generator) * 40, torch.randn(40, 64, generator=generator)
    targets = (hidden @ weight.t()).argmax(1)
    with torch.no_grad():
        log_probs, _ = linear_log_probs(hidden, weight, targets, vocab_size=40, method=method)
    assert (log_probs <= 0).all() and (log_probs == 0).sum() > 100

"""`vocab_parallel_log_probs` against its fp64 specification, on one rank. tests/gpu runs the tests that take
`kernels` on CUDA.

Bounds. fp32: at most twice the error that PyTorch's own log_softmax makes on the same inputs, plus a few
units in the last place of the largest number involved (one of the two errors may be 0 by luck). bf16 logits:
the same, for gradients rounded to bf16. Rows beside it, autograd on or off and `inplace` may not change a
log-prob at all: that comparison is bitwise.
"""

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megarl.kernels import log_probs as module
from megarl.kernels.log_probs import vocab_parallel_log_probs, vocab_parallel_log_probs_ref

SHAPES = [
    (1, 1, 1),
    (7, 2, 1),
    (5, 255, 255),
    (24, 320, 283),
    (3, 1500, 1500),
    (33, 2048, 2047),
]  # N, columns, vocab_size


def make_case(num_tokens, num_columns, vocab_size, dtype=torch.float32, shift=0.0):
    """Logits with a few certain rows and poisoned padding; targets that hit both ends of the vocabulary."""
    generator = torch.Generator().manual_seed(num_tokens * 7919 + num_columns)
    logits = torch.randn(num_tokens, num_columns, generator=generator) * 3 + shift
    logits[::3, 0] += 15
    logits[:, vocab_size:] = math.nan
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    targets[:1], targets[-1:] = 0, vocab_size - 1
    cotangents = torch.randn(2, num_tokens, generator=generator)
    return logits.to(dtype), targets, cotangents


def torch_log_probs(logits, targets, vocab_size, temperature):
    log_probs = torch.log_softmax(logits[:, :vocab_size].float() / temperature, dim=-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def run(function, logits, cotangents):
    """(log_probs, entropy, gradient) of a function logits -> (log_probs, entropy)."""
    logits = logits.detach().clone().requires_grad_()
    outputs = function(logits)
    torch.autograd.backward(outputs, [c.to(o.dtype) for c, o in zip(cotangents, outputs)])
    return *(output.detach() for output in outputs), logits.grad


def assert_at_most_twice_the_error(actual, torch_result, expected, slack):
    error, torch_error = (
        (actual.double() - expected).abs().max(),
        (torch_result.double() - expected).abs().max(),
    )
    assert error <= 2 * torch_error + slack, (
        f"error {error:.3g}, PyTorch's {torch_error:.3g}, slack {slack:.3g}"
    )


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature, shift", [(1.0, 0.0), (0.7, 0.0), (1.0, -120.0), (2.5, 80.0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradient_against_fp64(kernels, shape, temperature, shift, dtype):
    vocab_size = shape[2]
    logits, targets, cotangents = make_case(*shape, dtype, shift)
    options = dict(vocab_size=vocab_size, temperature=temperature)
    actual = run(
        lambda x: vocab_parallel_log_probs(x, targets, with_entropy=True, **options), logits, cotangents
    )
    of_torch = run(lambda x: torch_log_probs(x, targets, vocab_size, temperature), logits, cotangents)
    expected = run(lambda x: vocab_parallel_log_probs_ref(x, targets, **options), logits.double(), cotangents)
    assert actual[0].dtype == actual[1].dtype == torch.float32 and actual[2].dtype == dtype
    # Units in the last place: of fp32 at the size of the scaled logits (values), of the logits' dtype at the
    # size of the gradient.
    scaled = logits[:, :vocab_size].abs().max().item() / temperature
    slack = 4 * torch.finfo(torch.float32).eps * max(1, scaled)
    assert_at_most_twice_the_error(actual[0], of_torch[0], expected[0], slack)
    assert_at_most_twice_the_error(actual[1], of_torch[1], expected[1], slack)
    gradient_slack = slack * cotangents.abs().max().item() / temperature
    if (
        kernels == "interpret" and dtype != torch.float32
    ):  # Triton's interpreter rounds to it towards zero: up to twice the error
        gradient_slack += torch.finfo(dtype).eps * expected[2][:, :vocab_size].abs().max().item()
    gradients = [gradient[:, :vocab_size] for gradient in (actual[2], of_torch[2], expected[2])]
    assert_at_most_twice_the_error(*gradients, gradient_slack)
    assert (actual[2][:, vocab_size:] == 0).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(with_entropy):
    """In fp64. gradcheck goes backward many times where ours may once; the checkpoint gives each time a
    forward of its own."""
    logits, targets, _ = make_case(5, 7, 6, torch.float64)
    logits[:, 6] = 0
    function = lambda x: vocab_parallel_log_probs(
        x, targets, vocab_size=6, temperature=1.3, with_entropy=with_entropy
    )
    outputs = lambda x: [o for o in checkpoint(function, x, use_reentrant=False) if o is not None]
    assert torch.autograd.gradcheck(outputs, (logits.requires_grad_(),))


@pytest.mark.parametrize("used", ["log_probs", "entropy", "neither"])
def test_gradient_of_one_output_alone(kernels, used):
    logits, targets, cotangents = make_case(9, 20, 17)
    weights = torch.tensor({"log_probs": [1.0, 0], "entropy": [0, 1.0], "neither": [0, 0]}[used])
    expected = run(
        lambda x: vocab_parallel_log_probs_ref(x, targets, vocab_size=17),
        logits.double(),
        cotangents * weights[:, None],
    )[2]
    logits.requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(logits, targets, vocab_size=17, with_entropy=True)
    outputs = {
        "log_probs": log_probs @ cotangents[0],
        "entropy": entropy @ cotangents[1],
        "neither": 0 * log_probs.sum(),
    }
    outputs[used].backward()
    torch.testing.assert_close(logits.grad[:, :17].double(), expected[:, :17], atol=1e-6, rtol=0)


def test_one_token_vocabulary_is_certain(kernels):
    logits = torch.tensor([[-3.0], [1e4]], requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs(
        logits, torch.zeros(2, dtype=torch.int64), vocab_size=1, with_entropy=True
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.tolist() == [0, 0] and entropy.tolist() == [0, 0] and logits.grad.tolist() == [[0], [0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens(kernels, dtype, with_entropy):
    """A micro-batch without response tokens still has to reach the parameters, or data-parallel ranks wait
    for each other."""
    hidden = torch.zeros(0, 4, dtype=dtype, requires_grad=True)
    weight = torch.ones(6, 4, dtype=dtype, requires_grad=True)
    outputs = vocab_parallel_log_probs(
        hidden @ weight.T, torch.zeros(0, dtype=torch.int64), vocab_size=5, with_entropy=with_entropy
    )
    sum(output.sum() for output in outputs if output is not None).backward()
    assert outputs[0].shape == (0,) and (weight.grad == 0).all() and hidden.grad.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("num_columns, vocab_size", [(64, 61), (64, 64), (283, 283), (47, 40)])
def test_chunks_autograd_and_inplace_change_no_bit(monkeypatch, num_columns, vocab_size, with_entropy, dtype):
    """So the ratio is exactly 1 when old log-probs come from a pass without autograd and with other rows in
    the batch."""
    logits, targets, cotangents = make_case(37, num_columns, vocab_size, dtype)
    options = dict(vocab_size=vocab_size, temperature=0.9, with_entropy=with_entropy)

    def outputs(**more):
        return lambda x: [o for o in vocab_parallel_log_probs(x, targets, **options, **more) if o is not None]

    log_probs, *rest = run(outputs(), logits, cotangents)
    for elements, inplace in itertools.product([1, 5 * num_columns, 2**19], [False, True]):
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS_CPU", elements)
        actual, *actual_rest = run(outputs(inplace=inplace), logits, cotangents)
        assert torch.equal(actual, log_probs)
        # exp2 may round the elements that do not fill a SIMD vector otherwise: one unit in the last place of
        # p <= 1.
        for value, wanted in zip(actual_rest, rest):
            torch.testing.assert_close(value, wanted, atol=5e-7, rtol=torch.finfo(dtype).eps)
    with torch.no_grad():
        assert torch.equal(vocab_parallel_log_probs(logits, targets, **options)[0], log_probs)
    rows = [
        vocab_parallel_log_probs(logits[i : i + 1], targets[i : i + 1], **options)[0]
        for i in range(len(targets))
    ]
    assert torch.equal(torch.cat(rows), log_probs)


def test_triton_rows_do_not_depend_on_each_other(kernels):
    """Nor on autograd or `inplace`: the same program works on a row."""
    logits, targets, cotangents = make_case(9, 300, 283)
    options = dict(vocab_size=283, temperature=0.9, with_entropy=True)
    log_probs, entropy, gradient = run(
        lambda x: vocab_parallel_log_probs(x, targets, **options), logits, cotangents
    )
    order = torch.tensor([4, 0, 8, 3])
    for inplace in (False, True):
        actual = run(
            lambda x: vocab_parallel_log_probs(x, targets[order], inplace=inplace, **options),
            logits[order],
            cotangents[:, order],
        )
        for value, wanted in zip(actual, (log_probs, entropy, gradient)):
            torch.testing.assert_close(value, wanted[order], atol=5e-7 if kernels == "torch" else 0, rtol=0)


def test_a_nan_among_the_logits_shows(kernels):
    logits, targets, _ = make_case(3, 12, 12)
    logits[1, 5] = math.nan
    log_probs, entropy, gradient = run(
        lambda x: vocab_parallel_log_probs(x, targets, vocab_size=12, with_entropy=True),
        logits,
        torch.ones(2, 3),
    )
    assert (
        log_probs.isnan().tolist()
        == entropy.isnan().tolist()
        == gradient.isnan().all(1).tolist()
        == [False, True, False]
    )


def test_banned_tokens_have_probability_zero(kernels):
    """-inf logits (a mask on the vocabulary) leave a finite entropy and gradient, equal to those of the
    smaller vocabulary."""
    logits, targets, cotangents = make_case(6, 12, 12)
    logits[:, 4:8] = -math.inf
    allowed = [*range(4), *range(8, 12)]
    targets = torch.tensor([0, 1, 8, 11, 3, 9])
    log_probs, entropy, gradient = run(
        lambda x: vocab_parallel_log_probs(x, targets, vocab_size=12, with_entropy=True), logits, cotangents
    )
    smaller = torch.tensor([allowed.index(target) for target in targets.tolist()])
    expected = run(
        lambda x: vocab_parallel_log_probs_ref(x, smaller, vocab_size=8),
        logits[:, allowed].double(),
        cotangents,
    )
    for actual, wanted in zip((log_probs, entropy, gradient[:, allowed]), expected):
        torch.testing.assert_close(actual.double(), wanted, atol=2e-6, rtol=0)
    assert gradient[:, 4:8].abs().max() < 1e-28  # p is cut off at 2**-100 there


def saved_bytes(dtype, vocab_size=500, num_tokens=100, **options):
    """Bytes that autograd keeps between forward and backward, beyond tensors of size N; each storage once."""
    logits = torch.zeros(num_tokens, vocab_size, dtype=dtype).requires_grad_().clone()
    sizes = {}
    pack = lambda x: sizes.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        targets = torch.zeros(num_tokens, dtype=torch.int64)
        vocab_parallel_log_probs(logits, targets, vocab_size=vocab_size, **options)
    own = sizes.pop(logits.untyped_storage().data_ptr(), 0)
    return own, sum(size for size in sizes.values() if size > 8 * num_tokens * 4)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_what_is_kept_for_backward(with_entropy):
    """fp32: one buffer, not the logits; in place: the logits' memory only; bf16: the logits, nothing in
    fp32."""
    full = 100 * 500
    assert saved_bytes(torch.float32, with_entropy=with_entropy) == (0, 4 * full)
    assert saved_bytes(torch.float32, with_entropy=with_entropy, inplace=True) == (4 * full, 0)
    assert saved_bytes(torch.bfloat16, with_entropy=with_entropy) == (2 * full, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inplace_gives_the_gradient_in_the_memory_of_the_logits(kernels, dtype):
    logits, targets, _ = make_case(8, 16, 16, dtype)
    weight = torch.ones((), dtype=dtype, requires_grad=True)
    product = weight * logits
    log_probs, _ = vocab_parallel_log_probs(product, targets, vocab_size=16, inplace=True)
    (gradient,) = torch.autograd.grad(log_probs.sum(), product)
    assert gradient.data_ptr() == product.data_ptr()
    with torch.no_grad():  # no backward, no buffer: the logits stay
        before = logits.clone()
        vocab_parallel_log_probs(logits, targets, vocab_size=16, inplace=True)
        assert torch.equal(logits, before)


def test_inplace_is_refused_where_the_logits_are_needed_again():
    logits, targets, _ = make_case(8, 16, 16)
    capped = logits.requires_grad_().tanh()  # its derivative is computed from its output
    log_probs, _ = vocab_parallel_log_probs(capped, targets, vocab_size=16, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@pytest.mark.parametrize("dtype, inplace", [(torch.float32, True), (torch.bfloat16, True)])
def test_a_second_backward_is_refused_not_wrong(kernels, dtype, inplace):
    logits, targets, _ = make_case(8, 16, 16, dtype)
    log_probs, _ = vocab_parallel_log_probs(
        logits.requires_grad_().clone(), targets, vocab_size=16, inplace=inplace
    )
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(targets=torch.tensor([0, 5])), r"targets .* got 5 with vocab_size \(5\)"),
        (dict(targets=torch.tensor([-1, 0])), r"got -1"),
        (dict(targets=torch.tensor([0, 1], dtype=torch.int32)), r"int64 \[2\].*torch.int32"),
        (dict(targets=torch.tensor([0])), r"int64 \[2\].*\[1\]"),
        (dict(logits=torch.zeros(2, 6, dtype=torch.int64)), r"float tensor"),
        (dict(logits=torch.zeros(1, 2, 6)), r"\[N, V_tp\], got torch.float32 \[1, 2, 6\]"),
        (dict(vocab_size=7), r"vocab_size \(7\) must be in \[1, 6\]"),
        (dict(vocab_size=0), r"vocab_size \(0\)"),
        (dict(temperature=0.0), r"temperature \(0.0\)"),
        (dict(temperature=math.nan), r"temperature \(nan\)"),
    ],
)
def test_errors_name_the_value(change, message):
    arguments = dict(logits=torch.zeros(2, 6), targets=torch.tensor([0, 1]), vocab_size=5) | change
    with pytest.raises(ValueError, match=message):
        vocab_parallel_log_probs(arguments.pop("logits"), arguments.pop("targets"), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_row_of_banned_tokens_alone_shows(kernels, dtype):
    """Its log-prob and entropy are undefined, and finite numbers would hide that; the other rows do not see
    it."""
    logits, targets, cotangents = make_case(7, 40, 33, dtype)
    function = lambda x: vocab_parallel_log_probs(x, targets, vocab_size=33, with_entropy=True)
    expected = run(function, logits, cotangents)
    logits[2] = -math.inf
    found = run(function, logits, cotangents)
    others = torch.arange(7) != 2
    for value, wanted in zip(found, expected):
        assert value[2].flatten()[:33].isnan().all() and torch.equal(value[others], wanted[others])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_no_log_prob_is_above_zero(kernels, dtype, temperature):
    """Rows so sharp that the target is almost or altogether certain, at logits of many sizes."""
    count, generator = (
        20000 if kernels == "torch" else 100,
        torch.Generator().manual_seed(0),
    )  # the interpreter is slow
    sizes = 10 ** (4 * torch.rand(count, 1, generator=generator) - 1)
    logits = torch.randn(count, 40, generator=generator) * sizes + 300 * torch.randn(
        count, 1, generator=generator
    )
    logits = logits.to(dtype)
    log_probs, _ = vocab_parallel_log_probs(logits, logits.argmax(1), vocab_size=40, temperature=temperature)
    assert (
        (log_probs <= 0).all() and (log_probs == 0).sum() > count / 20 and (log_probs < 0).sum() > count / 20
    )


def test_rows_beyond_32_bit_offsets(kernels):
    """Row 2 begins 2**31 elements after row 0. Pages that nobody touches take no memory."""
    num_columns, stride = 300, 2**30
    values, targets, cotangents = make_case(3, num_columns, num_columns, torch.float16)
    far = torch.empty(2 * stride + num_columns, dtype=values.dtype).as_strided(values.shape, (stride, 1))
    results = []
    for logits in (values.clone(), far.copy_(values)):
        logits.requires_grad_()
        outputs = vocab_parallel_log_probs(
            logits, targets, vocab_size=num_columns, with_entropy=True, inplace=True
        )
        torch.autograd.backward(outputs, list(cotangents))
        results.append([x.detach() for x in (*outputs, logits.grad)])
    assert all(map(torch.equal, *results))

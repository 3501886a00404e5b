"""`fused_linear_policy_loss` against its fp64 specification, with the losses of the algorithms, on one rank.

Bounds are twice the error of plain PyTorch (matrix product, log_softmax, autograd) in the same dtype, plus a
few units in the last place. test_log_probs_tensor_parallel.py splits the vocabulary over ranks.
"""

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import FlopCounterMode

from megarl.algorithms.base import LossInputs
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.sft import SFT
from megarl.kernels import linear_head
from megarl.kernels.fused_linear_policy_loss import fused_linear_policy_loss, fused_linear_policy_loss_ref
from megarl.kernels.linear_log_probs import linear_log_probs
from tests.kernels.linear_cases import LargestTensor, assert_at_most_twice_the_error, make_case

ALGORITHMS = {
    "grpo": GRPO(),
    "dual clip, TIS": GRPO(clip_ratio_c=3.0, tis_clip=2.0, loss_aggregation="seq-mean-token-mean"),
    "k1": GRPO(kl_mode="loss", kl_coef=0.1, kl_estimator="k1", loss_aggregation="seq-mean-token-sum"),
    "k2, entropy": GRPO(
        kl_mode="loss", kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01, loss_aggregation="dr-grpo"
    ),
    "k3": GRPO(kl_mode="loss", kl_coef=0.1, kl_estimator="k3"),
    "reinforce, TIS, entropy": GRPO(policy_loss="reinforce", tis_clip=2.0, entropy_coef=0.01),
    "sapo, k3": GRPO(policy_loss="sapo", kl_mode="loss", kl_coef=0.1),
    "dppo-tv": GRPO(policy_loss="dppo-tv", dppo_threshold=1e-3),
    "dppo-kl": GRPO(policy_loss="dppo-kl", dppo_threshold=1e-3),
    "clip-cov": GRPO(policy_loss="clip-cov"),
    "kl-cov, k3": GRPO(policy_loss="kl-cov", kl_mode="loss", kl_coef=0.1),
    "sft": SFT(),
}


def make_loss(algorithm, num_tokens, advantages=None):
    """The algorithm's loss on columns near what `make_case` gives, some of them outside the clips."""
    generator = torch.Generator().manual_seed(num_tokens)
    noise = lambda size=1.0: torch.randn(num_tokens, generator=generator) * size
    advantages = noise() if advantages is None else advantages
    columns = noise() - 6, noise() - 6, noise() - 6, advantages

    def loss(log_probs, entropy, rows):
        old, rollout, ref, advantages = (x[rows].to(log_probs) for x in columns)
        selected = (advantages > 0.5).to(log_probs.dtype)  # by some column
        lengths = torch.full(log_probs.shape, 5, device=log_probs.device)
        return algorithm.loss(
            LossInputs(
                log_probs=log_probs,
                entropy=entropy,
                response_lengths=lengths,
                num_tokens=num_tokens + 10,
                num_sequences=7,
                max_response_length=9,
                kl_coef=getattr(algorithm, "kl_coef", 0.0),
                old_log_probs=old,
                rollout_log_probs=rollout,
                ref_log_probs=ref,
                advantages=advantages,
                selected_tokens=selected,
            )
        )

    return loss


def run(function, hidden, weight, scale=1.0):
    """(FusedLoss, gradients of hidden and weight)."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    out = function(hidden, weight)
    (scale * out.loss).backward()
    return out, hidden.grad, weight.grad


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "num_tokens, num_hidden, vocab_size, num_columns, shift, temperature",
    [(1, 8, 2, 2, 0.0, 1.0), (33, 16, 257, 257, -120.0, 1.0), (24, 32, 1500, 1536, 80.0, 0.7)],
)
def test_loss_and_gradients_against_fp64(
    kernels, name, num_tokens, num_hidden, vocab_size, num_columns, shift, temperature
):
    hidden, weight, targets, _ = make_case(num_tokens, num_hidden, vocab_size, num_columns, shift=shift)
    algorithm = ALGORITHMS[name]
    loss = make_loss(algorithm, num_tokens)
    options = dict(vocab_size=vocab_size, temperature=temperature, with_entropy=algorithm.needs_entropy)
    reference = lambda dtype: (
        lambda h, w: fused_linear_policy_loss_ref(h, w, targets, loss, dtype=dtype, **options)
    )
    actual = run(lambda h, w: fused_linear_policy_loss(h, w, targets, loss, **options), hidden, weight)
    of_torch = run(reference(torch.float32), hidden, weight)
    expected = run(reference(torch.float64), hidden.double(), weight.double())
    scaled = max(1, (hidden @ weight[:vocab_size].t()).abs().max().item() / temperature)
    ulps = 8 * torch.finfo(torch.float32).eps * scaled
    assert_at_most_twice_the_error(actual[0].log_probs, of_torch[0].log_probs, expected[0].log_probs, ulps)
    for got, torchs, wanted in zip(
        (actual[0].loss, *actual[1:]), (of_torch[0].loss, *of_torch[1:]), (expected[0].loss, *expected[1:])
    ):
        assert_at_most_twice_the_error(got, torchs, wanted, ulps * max(1e-3, wanted.abs().max().item()))
    assert (actual[2][vocab_size:] == 0).all()
    (metrics,) = actual[0].metrics
    for key, wanted in expected[0].metrics[0].items():
        assert not metrics[key].requires_grad
        torch.testing.assert_close(metrics[key].double().cpu(), wanted.double(), atol=10 * ulps, rtol=1e-3)


def test_gradcheck():
    hidden, weight, targets, _ = make_case(5, 4, 6, 7, dtype=torch.float64)
    weight[6:] = 0
    loss = lambda log_probs, entropy, rows: ((log_probs.square() - entropy).sum(), {})
    function = lambda h, w: (
        fused_linear_policy_loss(h, w, targets, loss, vocab_size=6, temperature=1.3, with_entropy=True).loss
    )

    class Again(torch.autograd.Function):
        """gradcheck goes backward many times where ours may once: each time with a forward of its own."""

        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return function(*inputs)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                return torch.autograd.grad(function(*leaves), leaves, grad)

    assert torch.autograd.gradcheck(Again.apply, (hidden.requires_grad_(), weight.requires_grad_()))


def test_bf16_inputs(kernels):
    """The weight's gradient is added up in fp32: better than PyTorch's, which is rounded to bf16 in every
    product."""
    hidden, weight, targets, _ = make_case(48, 64, 700, dtype=torch.bfloat16)
    loss, options = make_loss(GRPO(entropy_coef=0.01), 48), dict(vocab_size=700, with_entropy=True)
    main_grad = torch.zeros(700, 64)
    actual = run(
        lambda h, w: fused_linear_policy_loss(h, w, targets, loss, main_grad=main_grad, **options),
        hidden,
        weight,
    )
    naive = lambda h, w: fused_linear_policy_loss_ref(
        (h @ w.t()).float(), torch.eye(700), targets, loss, dtype=torch.float32, **options
    )
    of_torch = run(naive, hidden, weight)
    expected = run(
        lambda h, w: fused_linear_policy_loss_ref(h, w, targets, loss, **options),
        hidden.double(),
        weight.double(),
    )
    assert actual[2] is None and actual[1].dtype == torch.bfloat16
    for got, torchs, wanted in zip((actual[1], main_grad), of_torch[1:], expected[1:]):
        error, torch_error = ((x.double() - wanted).norm() / wanted.norm() for x in (got, torchs))
        assert error <= 1.5 * torch_error


def test_log_probs_are_bitwise_those_of_linear_log_probs(kernels, monkeypatch):
    """So that the ratio is exactly 1 where nothing was updated in between."""
    monkeypatch.setattr(linear_head, "_CHUNK_ELEMENTS_CPU", 1)
    monkeypatch.setattr(linear_head, "_MIN_ROWS_CPU", 10)
    hidden, weight, targets, _ = make_case(37, 32, 300)
    with torch.no_grad():
        old, _ = linear_log_probs(hidden, weight, targets, vocab_size=300, temperature=0.9, method="chunked")
    for entropy_coef in (0.0, 0.01):
        algorithm = GRPO(entropy_coef=entropy_coef)
        loss, options = (
            make_loss(algorithm, 37),
            dict(vocab_size=300, temperature=0.9, with_entropy=algorithm.needs_entropy),
        )
        assert torch.equal(
            run(lambda h, w: fused_linear_policy_loss(h, w, targets, loss, **options), hidden, weight)[
                0
            ].log_probs,
            old,
        )


def test_chunks_change_nothing_and_each_reports(kernels, monkeypatch):
    hidden, weight, targets, _ = make_case(13, 32, 200)
    loss = make_loss(ALGORITHMS["k2, entropy"], 13)
    function = lambda h, w: fused_linear_policy_loss(h, w, targets, loss, vocab_size=200, with_entropy=True)
    expected = run(function, hidden, weight)
    monkeypatch.setattr(linear_head, "_CHUNK_ELEMENTS_CPU", 1)
    for rows_per_chunk in (1, 5, 13):
        monkeypatch.setattr(linear_head, "_MIN_ROWS_CPU", rows_per_chunk)
        actual = run(function, hidden, weight)
        assert len(actual[0].metrics) == -(-13 // rows_per_chunk)
        total = sum(m["policy/loss"] for m in actual[0].metrics)
        for got, wanted in zip(
            (actual[0].loss, total, *actual[1:]), (expected[0].loss, expected[0].loss, *expected[1:])
        ):
            torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)


def test_twice_the_same_bits(kernels):
    hidden, weight, targets, _ = make_case(40, 32, 500)
    loss = make_loss(GRPO(), 40)
    (a, *first), (b, *second) = (
        run(lambda h, w: fused_linear_policy_loss(h, w, targets, loss, vocab_size=500), hidden, weight)
        for _ in "ab"
    )
    assert all(
        torch.equal(x, y) for x, y in zip((a.loss, a.log_probs, *first), (b.loss, b.log_probs, *second))
    )


@pytest.mark.parametrize("num_active", [0, 1, 7, 60])
def test_rows_without_a_gradient_cost_no_backward(monkeypatch, num_active):
    """FLOPs of three products, the last two for rows with a gradient only; no tensor is larger than one chunk
    of logits."""
    num_tokens, num_hidden, vocab_size = 60, 8, 100
    monkeypatch.setattr(linear_head, "_CHUNK_ELEMENTS_CPU", 1)
    monkeypatch.setattr(linear_head, "_MIN_ROWS_CPU", 10)
    hidden, weight, targets, _ = make_case(num_tokens, num_hidden, vocab_size)
    advantages = torch.zeros(num_tokens)
    advantages[torch.randperm(num_tokens)[:num_active]] = 1e-3
    loss = make_loss(GRPO(clip_eps_low=1.0, clip_eps_high=1e9), num_tokens, advantages)
    with FlopCounterMode(display=False) as flops, LargestTensor() as largest:
        actual = run(
            lambda h, w: fused_linear_policy_loss(h, w, targets, loss, vocab_size=vocab_size), hidden, weight
        )
    assert flops.get_total_flops() == 2 * num_hidden * vocab_size * (num_tokens + 2 * num_active)
    assert largest.elements == 10 * vocab_size
    expected = run(
        lambda h, w: fused_linear_policy_loss_ref(h, w, targets, loss, vocab_size=vocab_size),
        hidden.double(),
        weight.double(),
    )
    for got, wanted in zip(actual[1:], expected[1:]):
        torch.testing.assert_close(got.double(), wanted, atol=1e-8, rtol=1e-4)
    assert ((actual[1] != 0).any(1).sum()) == num_active


def test_a_token_without_advantage_keeps_its_entropy_bonus(kernels):
    """Its gradient of the log-prob is 0 and that of the entropy is not: it may not be left out."""
    hidden, weight, targets, _ = make_case(12, 16, 50)
    loss, options = (
        make_loss(GRPO(entropy_coef=0.1), 12, torch.tensor([0.0, 1.0] * 6)),
        dict(vocab_size=50, with_entropy=True),
    )
    actual = run(lambda h, w: fused_linear_policy_loss(h, w, targets, loss, **options), hidden, weight)
    expected = run(
        lambda h, w: fused_linear_policy_loss_ref(h, w, targets, loss, **options),
        hidden.double(),
        weight.double(),
    )
    assert (actual[1] != 0).any(1).all()
    for got, wanted in zip(actual[1:], expected[1:]):
        torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens(kernels, with_entropy):
    """The loss is still called, for its metrics, and the gradient 0 still reaches the parameters."""
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    loss = make_loss(GRPO(entropy_coef=0.01 if with_entropy else 0.0), 0)
    out = fused_linear_policy_loss(
        hidden, weight, torch.zeros(0, dtype=torch.int64), loss, vocab_size=5, with_entropy=with_entropy
    )
    out.loss.backward()
    assert out.loss == 0 and [m["policy/loss"].item() for m in out.metrics] == [0]
    assert hidden.grad.shape == (0, 4) and (weight.grad == 0).all()


def test_loss_scale_and_main_grad():
    hidden, weight, targets, _ = make_case(12, 16, 50)
    loss = make_loss(GRPO(), 12)
    _, grad_hidden, grad_weight = run(
        lambda h, w: fused_linear_policy_loss(h, w, targets, loss, vocab_size=50), hidden, weight
    )
    _, *scaled = run(
        lambda h, w: fused_linear_policy_loss(h, w, targets, loss, vocab_size=50), hidden, weight, scale=8.0
    )
    main_grad = torch.ones_like(weight)
    function = lambda h, w: fused_linear_policy_loss(
        h, w, targets, loss, vocab_size=50, main_grad=main_grad, loss_scale=8.0
    )
    out, into_main_grad, none = run(function, hidden, weight, scale=8.0)
    assert none is None
    for value in (scaled[0], into_main_grad):
        torch.testing.assert_close(value, 8 * grad_hidden, atol=0, rtol=1e-6)
    torch.testing.assert_close(scaled[1], 8 * grad_weight, atol=0, rtol=1e-6)
    torch.testing.assert_close(main_grad - 1, 8 * grad_weight, atol=2e-6, rtol=0)
    with pytest.raises(RuntimeError, match=r"backward started with 1.0, .* loss_scale \(8.0\)"):
        run(function, hidden, weight)


def test_without_autograd_and_with_frozen_inputs():
    hidden, weight, targets, _ = make_case(12, 16, 50)
    loss, main_grad = make_loss(GRPO(), 12), torch.zeros(50, 16)
    out, grad_hidden, grad_weight = run(
        lambda h, w: fused_linear_policy_loss(h, w, targets, loss, vocab_size=50), hidden, weight
    )
    with torch.no_grad():
        value = fused_linear_policy_loss(
            hidden, weight.requires_grad_(), targets, loss, vocab_size=50, main_grad=main_grad
        ).loss
    assert torch.equal(value, out.loss) and not value.requires_grad and (main_grad == 0).all()
    fused_linear_policy_loss(hidden, weight, targets, loss, vocab_size=50).loss.backward()
    assert torch.equal(weight.grad, grad_weight)
    hidden.requires_grad_()
    fused_linear_policy_loss(hidden, weight.detach(), targets, loss, vocab_size=50).loss.backward()
    assert torch.equal(hidden.grad, grad_hidden)


def test_a_second_backward_is_refused():
    hidden, weight, targets, _ = make_case(4, 8, 9)
    value = fused_linear_policy_loss(
        hidden.requires_grad_(), weight, targets, make_loss(GRPO(), 4), vocab_size=9
    ).loss
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward can run once"):
        value.backward()

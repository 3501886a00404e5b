"""VAPO's term on right answers and A-3PO's interpolated proximal policy against the papers' formulas in
float64.

    pytest tests/algorithms/test_loss_terms.py

Bound: 4e-6 relative to the largest number, as for the policy losses: fp32 with sums of some twenty terms."""

import math

import pytest
import torch

from megarl.algorithms import GRPO, AdvantageInputs, LossInputs
from megarl.algorithms.proximal import behavior_weights
from megarl.config.errors import FieldErrors

LENGTHS = [3, 1, 4, 2, 5]
REWARDS = [1.0, 0.0, 0.5, 1.0, math.nan]
MINI_BATCHES = [0, 0, 1, 1, 1]


def make_tokens():
    generator = torch.Generator().manual_seed(1)
    draw = lambda scale: -scale * torch.rand(sum(LENGTHS), generator=generator)
    now = draw(2.0)
    return dict(
        log_probs=now,
        rollout_log_probs=(now + 0.3 * torch.randn(len(now), generator=generator)).clamp(max=0),
        advantages=torch.randn(len(now), generator=generator),
        versions=torch.randint(2, 7, (len(now),), generator=generator),
    )


def loss_inputs(rows, tokens, **more):
    """Inputs of one mini-batch's tokens `rows`."""
    lengths = torch.tensor(LENGTHS)
    return LossInputs(
        response_lengths=lengths.repeat_interleave(lengths)[rows],
        num_tokens=len(rows),
        num_sequences=2,
        max_response_length=8,
        kl_coef=0.0,
        **{name: tokens[name][rows] for name in ("log_probs", "rollout_log_probs", "advantages")},
        **more,
    )


def column_of(algorithm, rows, left_out=(False,) * 5):
    lengths = torch.tensor(LENGTHS)
    inputs = AdvantageInputs(
        rewards=torch.tensor(REWARDS),
        group_ids=torch.zeros(5, dtype=torch.int64),
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=lengths[rows],
        kl_coef=0.0,
        sum_over_ranks=lambda values: values,
        sample_lengths=lengths,
        mini_batches=torch.tensor(MINI_BATCHES),
    )
    return algorithm.cross_entropy_weights(inputs, torch.tensor(REWARDS), torch.tensor(left_out))


@pytest.mark.parametrize("above, left_out", [(0.0, -1), (0.5, -1), (0.0, 3), (2.0, -1)])
def test_right_answers_add_their_mean_negative_log_prob(above, left_out):
    """2504.05118, eq. 10 and 11: mu times the sum over right answers of -log pi, over the number of their
    tokens in the mini-batch; zero where there is none. Each rank has the same weights for its samples."""
    algorithm = GRPO(positive_nll_coef=0.1, positive_nll_above=above)
    is_out = [sample == left_out for sample in range(5)]
    tokens, sample_of = make_tokens(), torch.arange(5).repeat_interleave(torch.tensor(LENGTHS))
    weights = column_of(algorithm, list(range(5)), is_out)["ce_weights"]
    for rows in ([0, 2], [4, 1, 3], []):
        split = weights.split(LENGTHS)
        wanted = torch.cat([torch.zeros(0), *(split[row] for row in rows)])
        assert torch.equal(column_of(algorithm, rows, is_out)["ce_weights"], wanted)
    for mini_batch in (0, 1):
        rows = torch.tensor([MINI_BATCHES[s] == mini_batch for s in sample_of]).nonzero()[:, 0]
        right = [
            s for s in range(5) if REWARDS[s] > above and MINI_BATCHES[s] == mini_batch and not is_out[s]
        ]
        count = sum(LENGTHS[s] for s in right)
        is_right = torch.tensor([int(s) in right for s in sample_of[rows]])
        own = tokens | {"log_probs": tokens["log_probs"].clone().requires_grad_()}
        more = dict(old_log_probs=tokens["log_probs"][rows] - 0.01)
        value, metrics = algorithm.loss(loss_inputs(rows, own, ce_weights=weights[rows], **more))
        plain, _ = GRPO().loss(loss_inputs(rows, own, **more))
        (gradient,) = torch.autograd.grad(value - plain, own["log_probs"])
        exact = tokens["log_probs"][rows].double()
        nll = -(exact[is_right]).sum().item() / count if count else 0.0
        assert metrics["policy/positive_nll"].item() == pytest.approx(nll, rel=4e-6)
        assert (value - plain).item() == pytest.approx(0.1 * nll, abs=4e-6)
        slope = torch.where(is_right, -0.1 / max(count, 1), 0.0)
        assert (gradient[rows] - slope).abs().max() <= 1e-6
        assert metrics["policy/loss"].item() == pytest.approx(plain.item(), rel=1e-6)


def test_without_its_flag_there_is_no_column():
    assert column_of(GRPO(), [0, 1]) == {}
    with pytest.raises(ValueError, match=r"positive_nll_above \(0.5\): needs --positive-nll-coef"):
        GRPO(positive_nll_above=0.5)


@pytest.mark.parametrize("clip", [None, 1.2])
def test_the_proximal_policy_is_interpolated_by_age(clip):
    """2512.06547: log pi_prox = (1 / d) log mu + (1 - 1 / d) log pi, d the age in versions, and of age 0 mu.
    The loss is decoupled PPO's (2505.24298, eq. 2), its weights truncated as in 1802.01561."""
    algorithm = GRPO(old_log_probs="interpolated", tis_clip=clip)
    tokens, version = make_tokens(), 6
    rows = torch.arange(len(tokens["log_probs"]))
    leaf = tokens["log_probs"].clone().requires_grad_()
    inputs = loss_inputs(
        rows,
        tokens | {"log_probs": leaf},
        old_log_probs=tokens["rollout_log_probs"].clone(),
        behavior_weights=behavior_weights(tokens["versions"], version),
    )
    value, metrics = algorithm.loss(inputs)
    (gradient,) = torch.autograd.grad(value, leaf)
    now = tokens["log_probs"].double().requires_grad_()
    total, weights, clipped = 0.0, [], 0
    for i in range(len(now)):
        age = version - int(tokens["versions"][i])
        mu, a = float(tokens["rollout_log_probs"][i]), float(tokens["advantages"][i])
        w = 1 / age if age > 0 else 1.0
        prox = w * mu + (1 - w) * now[i].item()
        ratio = (now[i] - prox).exp()
        bounded = ratio.clamp(0.8, 1.2)
        weight = min(math.exp(prox - mu), clip) if clip else 1.0
        clipped += bool((-a * bounded).item() > (-a * ratio).item())
        total = total + weight * torch.maximum(-a * ratio, -a * bounded)
        weights.append(weight)
    (expected,) = torch.autograd.grad(total / len(now), now)
    assert value.item() == pytest.approx(float(total.detach()) / len(now), abs=4e-6)
    assert (gradient - expected).abs().max() <= 4e-6 * expected.abs().max()
    assert 0 < clipped < len(now) and metrics["policy/clip_fraction"].item() == pytest.approx(
        clipped / len(now)
    )
    if clip:
        assert metrics["policy/tis_weight"].item() == pytest.approx(sum(weights) / len(now), rel=1e-5)
        assert len({round(weight, 6) for weight in weights}) > 3
    assert {version - int(v) for v in tokens["versions"]} >= {0, 1, 2, 3}


@pytest.mark.parametrize(
    "flags",
    [
        dict(mis_level="token"),
        dict(token_veto=1e-4),
        dict(tis_clip=2.0, tis_level="sequence"),
        dict(kl_mode="reward", kl_coef=0.1),
        dict(early_stop_kl=0.02),
        dict(policy_loss="kl-cov"),
        dict(policy_loss="clip-cov"),
    ],
)
def test_what_an_interpolation_cannot_give_is_refused(flags):
    with pytest.raises(ValueError, match=r"old_log_probs \(interpolated\): with interpolated, no"):
        GRPO(old_log_probs="interpolated", **flags)
    GRPO(old_log_probs="trainer", **flags)


def test_of_a_loss_that_does_not_exist_only_this_is_said():
    with pytest.raises(FieldErrors) as caught:
        GRPO(old_log_probs="interpolated", policy_loss="kl-kov")
    assert [name for name, _, _ in caught.value.errors] == ["policy_loss"]

"""GRPO's advantages, loss, gradients and metrics against naive_grpo.py, for every combination of its options.

Bounds: 2e-6 relative to the sum of the absolute token losses (about 30 fp32 numbers of size 1 each rounded a
few times), and to the largest gradient.
"""

import importlib.util
import itertools
import math
from pathlib import Path

import pytest
import torch

from megarl.algorithms import GRPO, AdvantageInputs, LossInputs
from megarl.kernels.log_probs import vocab_parallel_log_probs

spec = importlib.util.spec_from_file_location("naive_grpo", Path(__file__).with_name("naive_grpo.py"))
naive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(naive)

MAX_RESPONSE_LENGTH = 9
HALF = [(0.0, None, True), (0.0, 1.2, False), (0.2, None, False), (0.2, 1.2, True)]
"""entropy_coef, tis_clip and normalize_advantages_by_std: four of eight choices, in which every two meet."""
OTHER_HALF = [c for c in itertools.product((0.0, 0.2), (None, 1.2), (True, False)) if c not in HALF]
COLUMNS = ("log_probs", "old", "rollout", "ref", "entropy")
CLIPS = {
    "ppo": dict(),
    "asymmetric": dict(clip_eps_low=0.1, clip_eps_high=0.4),
    "dual": dict(clip_ratio_c=1.5),
    "cispo": dict(policy_loss="cispo", clip_eps_high=0.4),
}
KLS = [dict()] + [
    dict(kl_mode=m, kl_coef=0.3, kl_estimator=k)
    for m, k in itertools.product(["loss", "reward"], ["k1", "abs", "k2", "k3"])
]
KLS += [dict(kl_mode="loss", kl_coef=0.3, kl_estimator=k, kl_straight_through=True) for k in ("k1", "k3")]


def make_samples():
    """Seven samples of three groups, one failed, one group of one; log-probs far enough apart that every clip
    is met."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for group, reward, length in [
        (5, 1.0, 3),
        (2, 0.25, 6),
        (5, 0.0, 1),
        (5, float("nan"), 4),
        (2, -1.5, 9),
        (9, 2.0, 2),
        (2, 1.0, 5),
    ]:
        old = -2 * torch.rand(length, generator=generator) - 0.1
        noise = lambda scale: scale * torch.randn(length, generator=generator)  # noqa: B023
        columns = dict(
            log_probs=old + noise(0.6),
            old=old,
            rollout=old + noise(0.4),
            ref=old + noise(0.5),
            entropy=noise(1.0).abs(),
        )
        samples.append(dict(group=group, reward=reward, length=length, **columns))
    return samples


def naive_result(algorithm, samples):
    """(loss, metrics, gradients to log_probs and entropy [N]) of the loops, on the same fp32 numbers in
    fp64."""
    as_fp64 = [
        sample
        | {c: [x.double().requires_grad_(c in ("log_probs", "entropy")) for x in sample[c]] for c in COLUMNS}
        for sample in samples
    ]
    loss, metrics = naive.naive_grpo(as_fp64, algorithm, MAX_RESPONSE_LENGTH)
    leaves = {
        c: [x for sample in as_fp64 if not math.isnan(sample["reward"]) for x in sample[c]]
        for c in ("log_probs", "entropy")
    }
    grads = torch.autograd.grad(loss, leaves["log_probs"] + leaves["entropy"], materialize_grads=True)
    return loss.detach(), metrics, torch.stack(grads).view(2, -1)


def make_inputs(algorithm, samples):
    """LossInputs of the whole mini-batch in one, as a worker makes them without the failed samples, and the
    leaves of log_probs and entropy."""
    lengths = torch.tensor([sample["length"] for sample in samples])
    tokens = {c: torch.cat([sample[c] for sample in samples]) for c in COLUMNS}
    columns, _ = algorithm.compute_advantages(
        AdvantageInputs(
            rewards=torch.tensor([sample["reward"] for sample in samples]),
            group_ids=torch.tensor([sample["group"] for sample in samples]),
            rows=torch.arange(len(samples)),
            response_lengths=lengths,
            kl_coef=algorithm.kl_coef,
            sum_over_ranks=lambda total: total,
            old_log_probs=tokens["old"],
            ref_log_probs=tokens["ref"] if algorithm.needs_reference else None,
        )
    )
    is_scored = torch.tensor([not math.isnan(sample["reward"]) for sample in samples])
    rows = is_scored.repeat_interleave(lengths)
    tokens = {name: column[rows] for name, column in (tokens | columns).items()}
    leaves = [tokens[c].requires_grad_() for c in ("log_probs", "entropy")]
    inputs = LossInputs(
        log_probs=leaves[0],
        entropy=leaves[1] if algorithm.needs_entropy else None,
        old_log_probs=tokens["old"],
        rollout_log_probs=tokens["rollout"],
        ref_log_probs=tokens["ref"] if algorithm.needs_reference else None,
        advantages=tokens["advantages"],
        response_lengths=lengths.repeat_interleave(lengths)[rows],
        num_tokens=int(lengths[is_scored].sum()),
        num_sequences=int(is_scored.sum()),
        max_response_length=MAX_RESPONSE_LENGTH,
        kl_coef=algorithm.kl_coef,
    )
    return inputs, leaves


def take(inputs, index):
    """The LossInputs of some tokens: a micro-batch."""
    fields = {name: getattr(inputs, name) for name in LossInputs.__dataclass_fields__}
    return LossInputs(
        **{name: value[index] if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
    )


def gradients(loss, leaves):
    return torch.stack(torch.autograd.grad(loss, leaves, materialize_grads=True))


@pytest.mark.nightly_but_one_in(4)
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"]
)
@pytest.mark.parametrize("kl", KLS, ids=lambda kl: "-".join(str(value) for value in kl.values()) or "no-kl")
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize(
    "choices", [HALF, pytest.param(OTHER_HALF, marks=pytest.mark.nightly)], ids=["half", "other"]
)
def test_equals_the_loops(choices, clip, kl, aggregation):
    samples = make_samples()
    for entropy_coef, tis_clip, by_std in choices:
        options = dict(
            loss_aggregation=aggregation,
            entropy_coef=entropy_coef,
            tis_clip=tis_clip,
            normalize_advantages_by_std=by_std,
        )
        algorithm = GRPO(**clip, **kl, **options)
        expected, expected_metrics, expected_gradients = naive_result(algorithm, samples)
        inputs, leaves = make_inputs(algorithm, samples)
        loss, metrics = algorithm.loss(inputs)
        # Sequences' token sums are up to 30 / 7 times a token's loss of about 2.
        assert abs(loss.item() - expected) <= 2e-6 * 10, options
        assert (
            gradients(loss, leaves) - expected_gradients
        ).abs().max() <= 2e-6 * expected_gradients.abs().max(), options
        assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
            expected_metrics, rel=1e-5, abs=1e-6
        ), options
        assert not any(value.requires_grad or value.ndim for value in metrics.values())


def test_the_cases_meet_every_branch():
    """Otherwise the comparison above would prove less than it says."""
    _, metrics, _ = naive_result(GRPO(clip_ratio_c=1.5, tis_clip=1.2), make_samples())
    assert metrics["policy/clip_fraction"] > 0.1 and metrics["policy/dual_clip_fraction"] > 0.03
    assert 0.5 < metrics["policy/tis_weight"] < 1.15
    assert 0.2 < naive_result(GRPO(policy_loss="cispo"), make_samples())[1]["policy/clip_fraction"] < 0.9


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"]
)
@pytest.mark.parametrize("split", ["sequences", "tokens of any sequence", "one empty"])
@pytest.mark.parametrize("options", [dict(clip_ratio_c=3.0), dict(policy_loss="cispo")], ids=["ppo", "cispo"])
def test_shares_of_any_split_sum_to_the_whole(options, aggregation, split):
    """Micro-batches and data-parallel ranks: loss, gradient and metrics do not depend on who holds what. At
    most 1e-6."""
    algorithm = GRPO(
        loss_aggregation=aggregation, kl_mode="loss", kl_coef=0.1, entropy_coef=0.05, tis_clip=1.5, **options
    )
    inputs, leaves = make_inputs(algorithm, make_samples())
    whole, whole_metrics = algorithm.loss(inputs)
    num_tokens, generator = inputs.num_tokens, torch.Generator().manual_seed(1)
    parts = {
        "sequences": torch.arange(num_tokens).split([3, 6, 1, 9, 2, 5]),
        "tokens of any sequence": torch.randperm(num_tokens, generator=generator).split([11, 12, 3]),
        "one empty": (torch.arange(num_tokens), torch.arange(0)),
    }[split]
    shares = [algorithm.loss(take(inputs, part)) for part in parts]
    total = sum(loss for loss, _ in shares)
    assert abs(total - whole) <= 1e-6 * abs(whole) + 1e-7
    wanted = gradients(whole, leaves)
    assert (gradients(total, leaves) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert all(set(metrics) == set(whole_metrics) for _, metrics in shares)
    for name, value in whole_metrics.items():
        reduce = max if name.endswith("_max") else sum
        assert reduce(metrics[name] for _, metrics in shares).item() == pytest.approx(
            value.item(), rel=1e-5, abs=1e-7
        ), name


@pytest.mark.parametrize("options", [dict(clip_ratio_c=3.0), dict(policy_loss="cispo")], ids=["ppo", "cispo"])
def test_on_policy_is_reinforce_from_logits_on(options):
    """old = now: ratio exactly 1, clip fraction exactly 0, and the logits' gradient is that of -mean(A log
    p)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(26, 17, generator=generator).requires_grad_()
    targets = torch.randint(0, 17, (26,), generator=generator)
    algorithm = GRPO(**options)
    inputs, _ = make_inputs(algorithm, make_samples())
    log_probs, _ = vocab_parallel_log_probs(logits, targets, vocab_size=17)
    on_policy = dict(
        log_probs=log_probs, old_log_probs=log_probs.detach(), rollout_log_probs=log_probs.detach()
    )
    fields = {name: getattr(inputs, name) for name in LossInputs.__dataclass_fields__} | on_policy
    loss, metrics = algorithm.loss(LossInputs(**fields))
    for name in ("clip_fraction", "dual_clip_fraction", "kl", "ratio_deviation_max"):
        assert metrics[f"policy/{name}"] == 0
    reinforce = -(inputs.advantages * torch.log_softmax(logits, -1)[torch.arange(26), targets]).mean()
    actual, expected = (torch.autograd.grad(value, logits)[0] for value in (loss, reinforce))
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(actual, expected, atol=1e-8, rtol=0)


def test_equal_rewards_move_nothing():
    algorithm = GRPO()
    samples = [sample | dict(reward=0.7) for sample in make_samples()]
    inputs, leaves = make_inputs(algorithm, samples)
    assert (gradients(algorithm.loss(inputs)[0], leaves) == 0).all()


def test_entropy_bonus_raises_the_entropy():
    """A step along its gradient, through the softmax: with no advantage the policy becomes more even, and
    with a negative factor less."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(30, 17, generator=generator).requires_grad_()
    targets = torch.randint(0, 17, (30,), generator=generator)

    def mean_entropy(values):
        return vocab_parallel_log_probs(values, targets, vocab_size=17, with_entropy=True)[1].mean().item()

    for entropy_coef, sign in ((0.1, 1), (-0.1, -1)):
        algorithm = GRPO(entropy_coef=entropy_coef)
        inputs, _ = make_inputs(algorithm, [sample | dict(reward=0.0) for sample in make_samples()])
        log_probs, entropy = vocab_parallel_log_probs(logits, targets, vocab_size=17, with_entropy=True)
        fields = {name: getattr(inputs, name) for name in LossInputs.__dataclass_fields__}
        loss, metrics = algorithm.loss(
            LossInputs(
                **fields | dict(log_probs=log_probs, old_log_probs=log_probs.detach(), entropy=entropy)
            )
        )
        assert metrics["policy/entropy"].item() == pytest.approx(mean_entropy(logits), rel=1e-5)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert sign * (mean_entropy(logits.detach() - 10 * gradient) - mean_entropy(logits)) > 1e-3

"""Ratio transforms and off-policy corrections against the formulas of their papers, written as loops over
float64 scalars with autograd: loss, gradient and metrics, in every combination.

    pytest tests/algorithms/test_policy_losses.py

Bounds: 4e-6 relative to the sum of the absolute token losses, and to the largest gradient."""

import dataclasses
import itertools
import math
import typing

import pytest
import torch

from megarl.algorithms import GRPO, PPO, AdvantageInputs, LossInputs
from megarl.algorithms.promised_weight import promised_weight
from megarl.algorithms.ratio_transforms import OPTIONS, TRANSFORMS
from megarl.kernels.policy_loss import PolicyLossKind
from megarl.metrics import combine
from megarl.workers.loss_probes import check_token_level, policy_weight

MAX_RESPONSE_LENGTH = 9
COLUMNS = ("log_probs", "old", "rollout", "ref", "entropy")
LOSSES = {
    "reinforce": {},
    "sapo": {},
    "sapo-sharp": dict(policy_loss="sapo", sapo_tau_pos=2.0, sapo_tau_neg=3.0),
    "dppo-tv": dict(dppo_threshold=0.1),
    "dppo-kl": dict(dppo_threshold=0.05),
    "clip-cov": dict(cov_share=0.2, cov_low=0.01, cov_high=0.8),
    "kl-cov": dict(cov_share=0.2, cov_kl_coef=0.7),
    "gspo": {},
    "gspo-wide": dict(policy_loss="gspo", clip_eps_low=0.1, clip_eps_high=0.3),
    "gspo-token": {},
    "gmpo": {},
    "ppo": {},
    "cispo": {},
}
CORRECTIONS = {
    "none": {},
    "tis": dict(tis_clip=1.2),
    "tis-sequence": dict(tis_clip=1.5, tis_level="sequence"),
    "icepop": dict(tis_clip=1.8, mis_level="token", mis_low=0.7, mis_high=1.8),
    "mis": dict(mis_level="sequence", mis_low=0.7, mis_high=1.5),
    "geometric": dict(mis_level="geometric", mis_low=0.9, mis_high=1.1),
    "veto": dict(token_veto=0.7),
    "everything": dict(tis_clip=1.2, mis_level="geometric", mis_low=0.9, mis_high=1.1, token_veto=0.7),
}
EXTRAS = dict(kl_mode="loss", kl_coef=0.3, kl_estimator="k2", entropy_coef=0.2)


def build(loss, cls=GRPO, **options):
    return cls(**{"policy_loss": loss} | LOSSES[loss] | options)


def make_samples():
    """Seven samples, one of them failed; log-probs far enough apart that every clip and mask is met."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    lengths = [(1.0, 3), (0.25, 6), (-0.5, 1), (float("nan"), 4), (-1.5, 9), (2.0, 2), (1.0, 5)]
    for advantage, length in lengths:
        old = -2 * torch.rand(length, generator=generator) - 0.1
        noise = lambda scale: scale * torch.randn(length, generator=generator)  # noqa: B023
        samples.append(
            dict(
                advantage=advantage,
                log_probs=(old + noise(0.4)).clamp(max=-1e-3),
                old=old,
                rollout=(old + noise(0.3)).clamp(max=-1e-3),
                ref=old + noise(0.5),
                entropy=noise(1.0).abs(),
            )
        )
    return samples


def is_scored(sample):
    return not math.isnan(sample["advantage"])


def geometric_mean(ratios):
    product = torch.ones((), dtype=torch.float64)
    for ratio in ratios:
        product = product * ratio
    return product ** (1 / len(ratios))


def clip(value, low, high):
    return low if value < low else high if value > high else value


def pessimistic(a, algorithm, ratio):
    """min(s A, clip(s) A), negated; whether the clip holds."""
    clipped = clip(ratio, 1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high)
    is_held = bool(clipped * a < ratio * a)
    return -(clipped if is_held else ratio) * a, is_held


def token_losses(algorithm, a, sample):
    """[(loss, whether held)] of the tokens of one response: `a` is its advantage."""
    log_probs, old, mu = (sample[name] for name in ("log_probs", "old", "rollout"))
    ratios = [torch.exp(p - o) for p, o in zip(log_probs, old)]
    kind, found, selected = algorithm.policy_loss, [], sample.get("selected", [False] * len(old))
    if kind == "gspo":
        return [pessimistic(a, algorithm, geometric_mean(ratios))] * len(old)
    if kind == "gmpo":
        low, high = math.exp(-algorithm.clip_eps_low), math.exp(algorithm.clip_eps_high)
        kept = []
        for ratio in ratios:
            clipped = clip(ratio, low, high)
            kept.append(clipped if clipped * a < ratio * a else ratio)
        loss = -a * geometric_mean(kept)
        return [(loss, bool(k is not r)) for k, r in zip(kept, ratios)]
    for p, o, m, ratio, is_selected in zip(log_probs, old, mu, ratios, selected):
        now, then = math.exp(p.detach()), math.exp(m)
        if kind == "reinforce":
            found.append((-a * p, False))
        elif kind == "sapo":
            tau = algorithm.sapo_tau_pos if a > 0 else algorithm.sapo_tau_neg
            found.append((-a * (4 / tau) / (1 + torch.exp(-tau * (ratio - 1))), False))
        elif kind == "cispo":
            low, high = 1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high
            found.append((-a * clip(float(ratio.detach()), low, high) * p, not low <= ratio <= high))
        elif kind == "ppo":
            found.append(pessimistic(a, algorithm, ratio))
        elif kind == "clip-cov":
            found.append((0 * p, True) if is_selected else pessimistic(a, algorithm, ratio))
        elif kind == "kl-cov":
            found.append((-a * ratio + is_selected * algorithm.cov_kl_coef * abs(p - o), False))
        elif kind == "gspo-token":
            s = geometric_mean(ratios).detach() * ratio / ratio.detach()
            found.append(pessimistic(a, algorithm, s))
        else:
            if kind == "dppo-tv":
                divergence = abs(now - then)
            else:
                divergence = then * math.log(then / now) + (1 - then) * math.log((1 - then) / (1 - now))
            pushes_away = (a > 0) == (now > then)
            is_held = pushes_away and divergence > algorithm.dppo_threshold
            found.append((0 * p if is_held else -a * ratio, is_held))
    return found


def corrections_of(algorithm, sample):
    """(weight of each token, [whether truncated], [masked], [vetoed]) of one response."""
    w = [math.exp(o - m) for o, m in zip(sample["old"], sample["rollout"])]
    measure = {
        "none": w,
        "token": w,
        "sequence": [math.prod(w)] * len(w),
        "geometric": [math.prod(w) ** (1 / len(w))] * len(w),
    }
    tis = measure[algorithm.tis_level] if algorithm.tis_clip else [1.0] * len(w)
    truncated = [algorithm.tis_clip is not None and x > algorithm.tis_clip for x in tis]
    masked = [
        algorithm.mis_level != "none" and not algorithm.mis_low <= x <= algorithm.mis_high
        for x in measure[algorithm.mis_level]
    ]
    vetoed = [algorithm.token_veto is not None and min(w) < algorithm.token_veto] * len(w)
    weights = [min(x, algorithm.tis_clip or 1.0) * (not m) * (not v) for x, m, v in zip(tis, masked, vetoed)]
    return weights, truncated, masked, vetoed


def naive(algorithm, samples):
    """(loss, metrics) of the mini-batch of the samples with a reward."""
    samples = [s for s in samples if is_scored(s)]
    num_tokens = sum(len(s["old"]) for s in samples)
    total, sums = torch.zeros((), dtype=torch.float64), dict.fromkeys(["clip_fraction", "kl", "entropy"], 0.0)
    sums |= dict(ref_kl=0.0) if algorithm.needs_reference else {}
    for sample in samples:
        length, (weights, *_) = len(sample["old"]), corrections_of(algorithm, sample)
        for t, (loss, is_held) in enumerate(token_losses(algorithm, sample["advantage"], sample)):
            # Without the correction of a masked response the clip has nothing to hold.
            loss = loss * weights[t]
            d = sample["log_probs"][t] - sample["ref"][t]
            loss = loss + algorithm.kl_coef * d * d / 2 - algorithm.entropy_coef * sample["entropy"][t]
            share = (
                1 / num_tokens if algorithm.loss_aggregation == "token-mean" else 1 / length / len(samples)
            )
            total = total + loss * share
            moved = float(sample["log_probs"][t].detach() - sample["old"][t])
            sums["clip_fraction"] += is_held and (weights[t] > 0 or algorithm.policy_loss in ("cispo",))
            sums["kl"] += math.exp(moved) - 1 - moved
            uses_entropy = algorithm.entropy_coef != 0
            sums["entropy"] += float(sample["entropy"][t].detach() if uses_entropy else -sample["rollout"][t])
            if algorithm.needs_reference:
                sums["ref_kl"] += float(d.detach()) ** 2 / 2
    return total, {f"policy/{name}": value / num_tokens for name, value in sums.items()}


def naive_result(algorithm, samples):
    leaves, samples = ("log_probs", "entropy"), with_selected(algorithm, samples)
    fp64 = [s | {c: [x.double().requires_grad_(c in leaves) for x in s[c]] for c in COLUMNS} for s in samples]
    fp64 = [s | {c: [float(x) for x in s[c]] for c in ("old", "rollout", "ref")} for s in fp64]
    loss, metrics = naive(algorithm, fp64)
    inputs = [x for s in fp64 if is_scored(s) for x in s["log_probs"]]
    gradient = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return loss.detach(), metrics, torch.stack(gradient)


def column(algorithm, samples, rows=None, sum_over_ranks=lambda total: total):
    """Columns and metrics of `compute_corrections` on the rank that holds these rows of the samples."""
    return algorithm.compute_corrections(on_rank(samples, rows, sum_over_ranks))


def on_rank(samples, rows=None, sum_over_ranks=lambda total: total):
    rows = list(range(len(samples))) if rows is None else rows
    mine = [samples[row] for row in rows]
    cat = lambda name: torch.cat([torch.zeros(0), *(s[name] for s in mine)])
    return AdvantageInputs(
        rewards=torch.tensor([s["advantage"] for s in samples]),
        group_ids=torch.zeros(len(samples), dtype=torch.int64),
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=torch.tensor([len(s["old"]) for s in mine], dtype=torch.int64),
        kl_coef=0.0,
        sum_over_ranks=sum_over_ranks,
        old_log_probs=cat("old"),
        rollout_log_probs=cat("rollout"),
    )


def select(algorithm, samples, rows=None, sum_over_ranks=lambda total: total):
    """Column and metrics of `select_tokens` on the rank that holds these rows of the samples."""
    inputs = on_rank(samples, rows, sum_over_ranks)
    advantages = inputs.spread(inputs.rewards.nan_to_num(0.0))  # of a failed sample it is 0
    return algorithm.select_tokens(inputs, advantages)


def with_selected(algorithm, samples):
    """The samples, each with the list of its tokens' marks, if the loss has some."""
    found, _ = select(algorithm, samples)
    if not found:
        return samples
    parts = found["selected_tokens"].bool().split([len(s["old"]) for s in samples])
    return [s | dict(selected=part.tolist()) for s, part in zip(samples, parts)]


def make_inputs(algorithm, samples):
    """LossInputs of the whole mini-batch in one micro-batch, as a worker makes them, and the leaf."""
    scored = [s for s in samples if is_scored(s)]
    lengths = torch.tensor([len(s["old"]) for s in scored])
    tokens = {c: torch.cat([s[c] for s in scored]) for c in COLUMNS}
    corrections, _ = column(algorithm, samples)
    weights = corrections.get("correction_weights")
    if weights is not None:
        rows = torch.tensor([is_scored(s) for s in samples for _ in s["old"]])
        weights = weights[rows]
    marked = with_selected(algorithm, samples)
    selected = [float(x) for s in marked if is_scored(s) for x in s.get("selected", ())]
    leaf = tokens["log_probs"].requires_grad_()
    inputs = LossInputs(
        log_probs=leaf,
        entropy=tokens["entropy"] if algorithm.needs_entropy else None,
        old_log_probs=tokens["old"],
        rollout_log_probs=tokens["rollout"],
        ref_log_probs=tokens["ref"] if algorithm.needs_reference else None,
        advantages=torch.tensor([s["advantage"] for s in scored]).repeat_interleave(lengths),
        correction_weights=weights,
        selected_tokens=torch.tensor(selected) if selected else None,
        sequence_ids=torch.arange(len(scored)).repeat_interleave(lengths),
        response_lengths=lengths.repeat_interleave(lengths),
        num_tokens=int(lengths.sum()),
        num_sequences=len(scored),
        max_response_length=MAX_RESPONSE_LENGTH,
        kl_coef=algorithm.kl_coef,
    )
    return inputs, leaf


def take(inputs, index):
    fields = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(LossInputs)}
    return LossInputs(**{n: v[index] if isinstance(v, torch.Tensor) else v for n, v in fields.items()})


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_equal_the_papers_formulas(loss, correction):
    for extras, mode in itertools.product(({}, EXTRAS), ("token-mean", "seq-mean-token-mean")):
        algorithm = build(loss, loss_aggregation=mode, **CORRECTIONS[correction], **extras)
        samples = make_samples()
        expected, wanted, expected_gradient = naive_result(algorithm, samples)
        inputs, leaf = make_inputs(algorithm, samples)
        value, metrics = algorithm.loss(inputs)
        assert abs(value.item() - expected) <= 4e-6 * 10
        (gradient,) = torch.autograd.grad(value, leaf)
        assert (gradient - expected_gradient).abs().max() <= 4e-6 * expected_gradient.abs().max()
        found = {name: metrics[name].item() for name in wanted}
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert not any(m.requires_grad or m.ndim for m in metrics.values())


@pytest.mark.parametrize(
    "loss", [name for name in LOSSES if name not in ("reinforce", "sapo", "sapo-sharp", "kl-cov")]
)
def test_the_cases_meet_every_clip_and_mask(loss):
    """Otherwise the comparison above would prove less than it says."""
    held = naive_result(build(loss), make_samples())[1]["policy/clip_fraction"]
    assert 0.05 < held < 0.95


@pytest.mark.parametrize("split", [[[4, 0], [6, 3, 1], [5, 2]], [[], list(range(7)), []]])
@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
def test_corrections_and_their_metrics_on_any_ranks(correction, split):
    algorithm, samples = build("ppo", **CORRECTIONS[correction]), make_samples()
    contributions = []

    def stop(mine):
        contributions.append(mine.clone())
        raise ZeroDivisionError

    for rows in split:
        with pytest.raises(ZeroDivisionError):
            column(algorithm, samples, rows, stop)
    found = [column(algorithm, samples, rows, lambda _: sum(contributions)) for rows in split]
    lists = [s | {c: s[c].tolist() for c in COLUMNS} for s in samples]
    naive_parts = [corrections_of(algorithm, s) for s in lists]
    if algorithm.has_correction_column:
        of_token = algorithm.tis_clip if algorithm.tis_level == "token" else None
        for rows, (columns, _) in zip(split, found):
            tokens = [
                weight / (min(math.exp(o - m), of_token) if of_token else 1.0)
                for row in rows
                for weight, o, m in zip(naive_parts[row][0], lists[row]["old"], lists[row]["rollout"])
            ]
            wanted = torch.tensor(tokens, dtype=torch.float32)
            torch.testing.assert_close(columns["correction_weights"], wanted, rtol=1e-5, atol=0)
    scored = [part for part, s in zip(naive_parts, samples) if is_scored(s)]
    weights, truncated, masked, vetoed = ([x for part in scored for x in part[i]] for i in range(4))
    n = len(weights)
    wanted = {
        "weight": sum(weights) / n,
        "effective_sample_size": sum(weights) ** 2 / n / sum(w * w for w in weights),
    }
    if algorithm.tis_clip is not None:
        wanted["tis_truncated"] = sum(truncated) / n
    if algorithm.mis_level != "none":
        wanted["mis_masked"] = sum(masked) / n
    if algorithm.token_veto is not None:
        wanted["veto_masked"] = sum(vetoed) / n
    assert all(0 < value < 1.3 for value in wanted.values()), wanted  # each is met
    assert combine(metrics for _, metrics in found) == pytest.approx(
        {f"correction/{name}": value for name, value in wanted.items()}, rel=1e-6
    )


def test_on_policy_all_transforms_give_one_gradient():
    """pi = pi_old = mu: the gradient of -A log pi, whatever the transform and the correction. But clip-cov
    takes the gradient of some tokens away, and kl-cov's penalty has a kink there, whose gradient counts as
    0."""
    samples = [s | dict(log_probs=s["old"].clone(), rollout=s["old"]) for s in make_samples()]
    gradients = {}
    for loss, correction in itertools.product([name for name in LOSSES if name != "clip-cov"], CORRECTIONS):
        algorithm = build(loss, **CORRECTIONS[correction])
        inputs, leaf = make_inputs(algorithm, samples)
        value, metrics = algorithm.loss(inputs)
        (gradients[loss, correction],) = torch.autograd.grad(value, leaf)
        assert metrics["policy/clip_fraction"] == 0 and metrics["policy/ratio_deviation_max"] == 0
    wanted = -inputs.advantages / inputs.num_tokens
    for key, gradient in gradients.items():
        assert (gradient - wanted).abs().max() <= 1e-7, key


@pytest.mark.parametrize("loss", LOSSES)
def test_parts_of_any_split_add_up_to_the_whole(loss):
    """Of tokens in any order for losses of tokens, else of whole sequences in any order."""
    algorithm = build(loss, **CORRECTIONS["everything"], **EXTRAS)
    inputs, leaf = make_inputs(algorithm, make_samples())
    whole, metrics = algorithm.loss(inputs)
    (wanted,) = torch.autograd.grad(whole, leaf)
    tokens = torch.arange(26).split([3, 6, 1, 9, 2, 5])
    splits = [
        [torch.cat([tokens[4], tokens[1]]), torch.arange(0), torch.cat([tokens[i] for i in (3, 5, 0, 2)])]
    ]
    if algorithm.token_level:
        splits.append(torch.randperm(26, generator=torch.Generator().manual_seed(1)).split([11, 12, 3]))
    for parts in splits:
        shares = [algorithm.loss(take(inputs, part)) for part in parts]
        total = sum(share for share, _ in shares)
        assert abs(total - whole) <= 1e-6 * abs(whole) + 1e-6
        gradient = torch.autograd.grad(total, leaf)[0]
        assert (gradient - wanted).abs().max() <= 2e-6 * wanted.abs().max()
        found = combine({n: v.item() for n, v in share.items()} for _, share in shares)
        assert found == pytest.approx({n: v.item() for n, v in metrics.items()}, rel=1e-5, abs=1e-6)


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_checks_of_a_first_update_hold(loss, correction):
    """The measured token weights are what is promised, and `token_level` says what is so."""
    algorithm = build(loss, PPO, **CORRECTIONS[correction])
    inputs, _ = make_inputs(algorithm, make_samples())
    counts = inputs.num_tokens, inputs.num_sequences, MAX_RESPONSE_LENGTH
    promised = promised_weight(algorithm, "loss", *counts)
    assert float(policy_weight(algorithm, inputs)) == pytest.approx(promised, rel=1e-6)
    if algorithm.token_level:
        assert check_token_level(algorithm, inputs, is_whole=True)
    else:
        with pytest.raises(ValueError, match="is no sum over tokens"):
            check_token_level(algorithm, inputs, is_whole=True)


def test_the_flags_are_those_of_the_table():
    assert typing.get_type_hints(GRPO)["policy_loss"] is str  # a file of the user's too
    kernels = {name for name, transform in TRANSFORMS.items() if transform.loss is None}
    assert kernels == set(typing.get_args(PolicyLossKind))
    assert OPTIONS <= {field.name for field in dataclasses.fields(GRPO)}
    for name, transform in TRANSFORMS.items():
        algorithm = GRPO(policy_loss=name)
        assert {n: getattr(algorithm, n) for n in transform.defaults} == transform.defaults
        assert all(getattr(algorithm, n) is None for n in OPTIONS - set(transform.defaults))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(policy_loss="gspo", clip_ratio_c=3.0), r"clip_ratio_c \(3.0\): is not for --policy-loss gspo"),
        (dict(sapo_tau_pos=1.0), r"sapo_tau_pos \(1.0\): is not for --policy-loss ppo. Leave it out"),
        (
            dict(policy_loss="reinforce", clip_eps_low=0.1),
            r"clip_eps_low \(0.1\): is not for --policy-loss rein",
        ),
        (dict(policy_loss="dppo-tv", dppo_threshold=0.0), r"dppo_threshold \(0.0\): must be above 0"),
        (dict(tis_level="sequence"), r"tis_level \(sequence\): needs --tis-clip. Try --tis-clip 2"),
        (dict(mis_low=0.5), r"mis_low \(0.5\): needs --mis-level"),
        (dict(mis_level="token", mis_low=6.0), r"mis_high \(5.0\): must be above --mis-low \(6.0\)"),
        (dict(mis_level="all"), r"mis_level \(all\): must be none, token, sequence or geometric"),
        (dict(token_veto=1.0), r"token_veto \(1.0\): must be below 1"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GRPO(**options)


def test_columns_that_corrections_read_and_write():
    plain, corrected = GRPO(tis_clip=2.0), PPO(tis_clip=2.0, token_veto=1e-4)
    assert plain.advantage_reads == ("rewards", "old_log_probs") and plain.advantage_writes == ("advantages",)
    assert corrected.advantage_reads == ("rewards", "old_log_probs", "values")
    assert corrected.advantage_writes == ("advantages", "returns", "correction_weights")
    assert corrected.loss_reads == ("old_log_probs", "advantages", "correction_weights")

"""PPO's advantages, returns, value loss and metrics against naive_ppo.py, whole and spread over ranks. The
policy loss is GRPO's: test_grpo.py.

    pytest tests/algorithms/test_ppo.py

Bounds: 2e-6 relative to the largest number (sums of some ten fp32 numbers of size 1), 4e-6 where a whitening
divides by a standard deviation of about 1.
"""

import importlib.util
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.algorithms import GRPO, PPO, AdvantageInputs, LossInputs, ValueLossInputs
from megarl.algorithms.base import ReferenceInputs
from megarl.metrics import combine

spec = importlib.util.spec_from_file_location("naive_ppo", Path(__file__).with_name("naive_ppo.py"))
naive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(naive)

MAX_RESPONSE_LENGTH = 9
KL_COEF = 0.4  # of the controller: not the flag's
KLS = [dict()] + [
    dict(kl_mode=m, kl_coef=0.3, kl_estimator=k)
    for m, k in itertools.product(["loss", "reward"], ["k1", "abs", "k2", "k3"])
]


def make_samples():
    """Seven samples, one failed, one of one token; values wander by about the clip."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for reward, length in [(1.0, 3), (0.25, 6), (0.0, 1), (math.nan, 4), (-1.5, 9), (2.0, 2), (1.0, 5)]:
        noise = lambda scale: scale * torch.randn(length, generator=generator)  # noqa: B023
        old, old_values = -2 * torch.rand(length, generator=generator), 0.5 + noise(0.7)
        samples.append(
            dict(
                reward=reward,
                old=old,
                ref=old + noise(0.5),
                old_values=old_values,
                values=old_values + noise(0.4),
            )
        )
    return samples


def as_lists(samples):
    return [
        {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
        for sample in samples
    ]


def cat(samples, name):
    return torch.cat([sample[name] for sample in samples]) if samples else torch.zeros(0)


def inputs_of(samples, rows, algorithm, sum_over_ranks=lambda total: total):
    """AdvantageInputs of the rank that holds these rows of the step's samples; columns that are not asked for
    are None."""
    mine = [samples[row] for row in rows]
    names = {"old_log_probs": "old", "ref_log_probs": "ref", "values": "old_values"}
    return AdvantageInputs(
        rewards=torch.tensor([s["reward"] for s in samples]),
        group_ids=torch.zeros(len(samples), dtype=torch.int64),
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=torch.tensor([len(s["old"]) for s in mine], dtype=torch.int64),
        kl_coef=KL_COEF,
        sum_over_ranks=sum_over_ranks,
        sample_lengths=torch.tensor([len(s["old"]) for s in samples]),
        **{
            column: cat(mine, name) if column in algorithm.advantage_reads else None
            for column, name in names.items()
        },
    )


def on_ranks(samples, split, algorithm):
    """[(columns, metrics)] of ranks that hold these rows, with an all-reduce that adds up what they
    contribute. Each calls once at most."""
    contributions = []
    for rows in split:
        try:
            algorithm.compute_advantages(
                inputs_of(samples, rows, algorithm, lambda mine: contributions.append(mine.clone()) or 1 / 0)
            )
        except ZeroDivisionError:
            pass
    assert len(contributions) in (0, len(split)), "every rank must take part in a collective"
    return [
        algorithm.compute_advantages(inputs_of(samples, rows, algorithm, lambda _: sum(contributions)))
        for rows in split
    ]


def scored(samples):
    return [sample for sample in samples if not math.isnan(sample["reward"])]


def value_inputs(samples, returns, split=None):
    """ValueLossInputs of these tokens, a micro-batch, and their leaf of values."""
    lengths = torch.tensor([len(s["old"]) for s in samples])
    values = cat(samples, "values").requires_grad_()
    index = torch.arange(len(values)) if split is None else split
    return values, ValueLossInputs(
        values=values[index],
        old_values=cat(samples, "old_values")[index],
        returns=returns[index],
        response_lengths=lengths.repeat_interleave(lengths)[index],
        num_tokens=len(values),
        num_sequences=len(samples),
        max_response_length=MAX_RESPONSE_LENGTH,
    )


def naive_columns(samples, algorithm):
    advantages, returns, metrics = naive.naive_advantages(as_lists(samples), algorithm, KL_COEF)
    return torch.tensor(sum(advantages, [])), torch.tensor(sum(returns, [])), metrics


DECAYS = [
    dict(critic_gae_lambda=1.0),
    dict(gae_lambda_alpha=0.5),  # responses of one and two tokens have decay 0
    dict(gae_lambda_alpha=2.0, critic_gae_lambda=1.0, gamma=0.9),
]


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("decays", DECAYS, ids=str)
@pytest.mark.parametrize("kl", KLS[::5], ids=lambda kl: str(kl.get("kl_mode")))
def test_policy_and_critic_may_have_decays_of_their_own(kl, decays, whiten):
    """Whole and on two ranks, and by the reference that each rank compares with."""
    samples, algorithm = make_samples(), PPO(whiten_advantages=whiten, **kl, **decays)
    wanted = naive_columns(samples, algorithm)
    split = [[0, 3, 6], [5, 1, 2, 4]]
    whole = [algorithm.compute_advantages(inputs_of(samples, range(7), algorithm))]
    for rows_of_ranks, results in (([[*range(7)]], whole), (split, on_ranks(samples, split, algorithm))):
        lengths = [len(s["old"]) for s in samples]
        for rows, (columns, _) in zip(rows_of_ranks, results, strict=True):
            for name, expected in zip(("advantages", "returns"), wanted[:2]):
                mine = torch.cat([expected.split(lengths)[row] for row in rows])
                torch.testing.assert_close(
                    columns[name].double(), mine.double(), atol=8e-6, rtol=4e-6, equal_nan=True
                )
        metrics = combine([metrics for _, metrics in results])
        for name, value in wanted[2].items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    check_reference(samples, algorithm, whole[0][0])


def check_reference(samples, algorithm, columns):
    """The plain recomputation of each sample differs by rounding from these columns of the whole step."""
    lengths = [len(s["old"]) for s in samples]
    given = {"old_log_probs": "old", "ref_log_probs": "ref", "values": "old_values"}
    split = {name: column.split(lengths) for name, column in columns.items()}
    inputs = ReferenceInputs(
        rewards={row: s["reward"] for row, s in enumerate(samples)},
        positions={row: row for row in range(7)},
        groups={row: [row] for row in range(7)},
        samples=range(7),
        columns=lambda row, name: samples[row][given[name]] if name in given else split[name][row],
        kl_coef=KL_COEF,
        lengths=dict(enumerate(lengths)),
    )
    inputs = replace(inputs, sums=algorithm.reference_sums(inputs) or ())
    for row in range(7):
        for name, reference in algorithm.reference_advantages(inputs, row).items():
            for value, expected, size in zip(
                split[name][row].tolist(), reference.values, reference.magnitudes
            ):
                if not (math.isnan(value) and math.isnan(expected)):
                    assert abs(value - expected) <= 16 * torch.finfo(torch.float32).eps * size, (row, name)


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.97, 0.0)])
@pytest.mark.parametrize("kl", KLS, ids=lambda kl: "-".join(str(value) for value in kl.values()) or "no-kl")
def test_advantages_equal_the_loops(kl, gamma, gae_lambda, whiten):
    samples, algorithm = (
        make_samples(),
        PPO(gamma=gamma, gae_lambda=gae_lambda, whiten_advantages=whiten, **kl),
    )
    columns, metrics = algorithm.compute_advantages(inputs_of(samples, range(7), algorithm))
    assert tuple(columns) == algorithm.advantage_writes
    advantages, returns, wanted = naive_columns(samples, algorithm)
    assert advantages.abs().max() > 1 and (advantages[10:14] == 0).all() and returns[10:14].isnan().all()
    torch.testing.assert_close(
        columns["advantages"], advantages, rtol=0, atol=4e-6 * float(advantages.abs().max())
    )
    torch.testing.assert_close(
        columns["returns"],
        returns,
        rtol=0,
        atol=2e-6 * float(returns.nan_to_num().abs().max()),
        equal_nan=True,
    )
    assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "split", [[[4, 0], [6, 3, 1], [5, 2]], [[], list(range(7)), []], [[3], [0, 1, 2, 4], [6, 5]]]
)
@pytest.mark.parametrize(
    "algorithm", [PPO(), PPO(kl_mode="reward", kl_coef=0.1, gamma=0.9), GRPO(kl_mode="reward", kl_coef=0.1)]
)
def test_does_not_depend_on_who_holds_what(algorithm, split):
    """Three ranks, one of them with nothing or with the failed sample alone. Sums in another order: 1e-6
    relative."""
    samples = make_samples()
    whole, whole_metrics = algorithm.compute_advantages(
        inputs_of(samples, range(7), algorithm, lambda total: total)
    )
    lengths = [len(s["old"]) for s in samples]
    ranks = on_ranks(samples, split, algorithm)
    for rows, (columns, _) in zip(split, ranks):
        for name, column in columns.items():
            of_sample = whole[name].split(lengths)
            wanted = torch.cat([of_sample[row] for row in rows]) if rows else torch.zeros(0)
            torch.testing.assert_close(
                column,
                wanted,
                rtol=0,
                atol=1e-6 * float(wanted.nan_to_num().abs().max()) if rows else 0,
                equal_nan=True,
            )
    assert combine(metrics for _, metrics in ranks) == pytest.approx(whole_metrics, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"]
)
@pytest.mark.parametrize("eps", [0.2, 0.5, None])
def test_value_loss_equals_the_loops_whole_and_split(eps, aggregation):
    samples, algorithm = scored(make_samples()), PPO(value_clip_eps=eps, loss_aggregation=aggregation)
    _, returns, _ = naive_columns(samples, algorithm)
    targets = [row.tolist() for row in returns.split([3, 6, 1, 9, 2, 5])]
    _, gradient, wanted = naive.naive_value_loss(as_lists(samples), targets, algorithm, MAX_RESPONSE_LENGTH)
    assert eps != 0.2 or wanted["critic/clip_fraction"] > 0.1
    shuffled = torch.randperm(26, generator=torch.Generator().manual_seed(1))
    for parts in ([torch.arange(26)], shuffled.split([11, 12, 3]), [torch.arange(26), torch.arange(0)]):
        values, gradients, metrics = None, torch.zeros(26), []
        for part in parts:
            values, inputs = value_inputs(samples, returns, part)
            loss, shares = algorithm.value_loss(inputs)
            gradients += torch.autograd.grad(loss, values)[0]
            metrics.append({name: share.item() for name, share in shares.items()})
            assert not any(share.requires_grad for share in shares.values())
        assert combine(metrics) == pytest.approx(wanted, rel=2e-6, abs=1e-7)
        torch.testing.assert_close(
            gradients, torch.tensor(gradient), rtol=0, atol=2e-6 * max(map(abs, gradient))
        )


def test_a_failed_reward_changes_nothing_for_the_others():
    """As if the sample were not there, whatever its values."""
    algorithm, samples = PPO(), make_samples()
    others = scored(samples)
    samples[3]["old_values"] = torch.full((4,), 1e6)
    with_it, metrics = algorithm.compute_advantages(inputs_of(samples, range(7), algorithm))
    without, wanted = algorithm.compute_advantages(inputs_of(others, range(6), algorithm))
    for name in ("advantages", "returns"):
        assert torch.equal(torch.cat([with_it[name][:10], with_it[name][14:]]), without[name])
    assert metrics == wanted | {"reward/failed": 1}
    all_failed = [sample | dict(reward=math.nan) for sample in samples]
    columns, metrics = algorithm.compute_advantages(inputs_of(all_failed, range(7), algorithm))
    assert (
        (columns["advantages"] == 0).all()
        and metrics["reward/failed"] == 7
        and metrics["critic/explained_variance"] == 0
    )


def test_a_critic_that_gives_nan_is_seen():
    samples, algorithm = make_samples(), PPO()
    samples[1]["old_values"][2] = math.nan
    columns, _ = algorithm.compute_advantages(inputs_of(samples, range(7), algorithm))
    assert columns["advantages"][0].isnan()
    assert algorithm.value_loss(value_inputs(samples, columns["returns"])[1])[0].isnan()


def test_infinite_reward_is_refused():
    samples = make_samples()
    samples[1]["reward"] = math.inf
    with pytest.raises(ValueError, match=r"rewards\[1\] \(inf\) must be finite"):
        PPO().compute_advantages(inputs_of(samples, range(7), PPO()))


@pytest.mark.parametrize("reward, scale", [(1.0, 1.0), (0.0, 1.0), (0.0, 1e-4)])
def test_equal_returns_have_no_explained_variance(reward, scale):
    """gamma = lambda = 1: every return is the reward, up to the rounding of advantage + value."""
    samples = [s | dict(reward=reward, old_values=scale * s["old_values"]) for s in make_samples()]
    algorithm = PPO(gae_lambda=1.0)
    assert (
        algorithm.compute_advantages(inputs_of(samples, range(7), algorithm))[1]["critic/explained_variance"]
        == 0
    )


def test_the_loss_takes_the_controllers_factor():
    """And the flag's counts for nothing once there is a controller."""
    generator = torch.Generator().manual_seed(0)
    log_probs, old, ref = (-torch.rand(5, generator=generator) for _ in range(3))

    def loss(algorithm, kl_coef):
        return algorithm.loss(
            LossInputs(
                log_probs=log_probs,
                old_log_probs=old,
                ref_log_probs=ref,
                rollout_log_probs=old,
                advantages=torch.zeros(5),
                kl_coef=kl_coef,
                response_lengths=torch.full((5,), 5),
                num_tokens=5,
                num_sequences=1,
                max_response_length=9,
            )
        )[0].item()

    kl = sum(naive.estimate_kl(d, "k3") for d in (log_probs - ref).tolist()) / 5
    assert loss(PPO(kl_mode="loss", kl_coef=0.1), 0.7) == pytest.approx(0.7 * kl, rel=1e-5)
    assert loss(PPO(kl_mode="reward", kl_coef=0.1), 0.7) == 0


def test_columns():
    assert PPO().advantage_reads == ("rewards", "values") and PPO().advantage_writes == (
        "advantages",
        "returns",
    )
    assert PPO(kl_mode="loss", kl_coef=0.1).advantage_reads == (
        "rewards",
        "old_log_probs",
        "ref_log_probs",
        "values",
    )
    assert GRPO().advantage_reads == ("rewards",) and GRPO().advantage_writes == ("advantages",)

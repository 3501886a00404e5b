"""PPO-Lagrangian's advantages, returns and multiplier against the paper's formulas (arXiv:2310.12773) in
float64.

    pytest tests/algorithms/test_ppo_lagrangian.py

Bound: 4e-6 relative to the largest number, as for PPO's whitening."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs
from megarl.algorithms.base import ReferenceInputs
from megarl.algorithms.lagrange import LagrangeMultiplier, PIDMultiplier
from megarl.algorithms.several_scores import StepScores
from megarl.metrics import combine

Lagrangian = REGISTRY["ppo-lagrangian"]
REWARDS = [1.0, 0.0, math.nan, 0.5, -1.0]
COSTS = [0.2, 1.5, math.nan, 0.0, 0.7]
LENGTHS = [3, 1, 2, 5, 4]
GAMMA, DECAY, FACTOR = 0.9, 0.8, 1.7


def make_columns():
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(sum(LENGTHS), generator=generator) for name in ("values", "cost_values")}


def inputs_of(rows, sum_over_ranks=lambda values: values):
    parts = {name: column.split(LENGTHS) for name, column in make_columns().items()}
    return AdvantageInputs(
        rewards=torch.tensor(REWARDS),
        group_ids=torch.zeros(5, dtype=torch.int64),
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=torch.tensor(LENGTHS)[rows],
        kl_coef=0.0,
        sum_over_ranks=sum_over_ranks,
        sample_lengths=torch.tensor(LENGTHS),
        scores=StepScores({"correct": REWARDS, "cost": COSTS}, {"correct": 1.0, "cost": 0.0}, FACTOR),
        **{name: torch.cat([torch.zeros(0), *(of[row] for row in rows)]) for name, of in parts.items()},
    )


def gae(values, last):
    """delta_t = r_t + gamma V_t+1 - V_t, A_t = sum over k of (gamma lambda)^k delta_t+k, as a double sum."""
    n = len(values)
    deltas = [
        (last if t == n - 1 else 0.0) + GAMMA * (values[t + 1] if t + 1 < n else 0.0) - values[t]
        for t in range(n)
    ]
    return [sum((GAMMA * DECAY) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def wanted():
    """Sample -> (mixed advantages, returns, cost returns) before whitening."""
    columns = {name: column.double().split(LENGTHS) for name, column in make_columns().items()}
    found = {}
    for row, (reward, cost) in enumerate(zip(REWARDS, COSTS)):
        if math.isnan(reward):
            continue
        values, cost_values = columns["values"][row].tolist(), columns["cost_values"][row].tolist()
        of_reward, of_cost = gae(values, reward), gae(cost_values, cost)
        mixed = [(a - FACTOR * c) / (1 + FACTOR) for a, c in zip(of_reward, of_cost)]
        returns = [a + v for a, v in zip(of_reward, values)]
        found[row] = mixed, returns, [c + v for c, v in zip(of_cost, cost_values)]
    return found


def algorithm(whiten):
    return Lagrangian(gamma=GAMMA, gae_lambda=DECAY, whiten_advantages=whiten)


@pytest.mark.parametrize("whiten", [True, False])
def test_columns_equal_the_papers_formula(whiten):
    columns, metrics = algorithm(whiten).compute_advantages(inputs_of(list(range(5))))
    found = {name: column.double().split(LENGTHS) for name, column in columns.items()}
    everything = [x for mixed, _, _ in wanted().values() for x in mixed]
    mean, std = statistics.fmean(everything), statistics.stdev(everything)
    for row in range(5):
        if row not in wanted():
            assert (found["advantages"][row] == 0).all()
            assert found["returns"][row].isnan().all() and found["cost_returns"][row].isnan().all()
            continue
        mixed, returns, cost_returns = wanted()[row]
        mixed = [(x - mean) / std for x in mixed] if whiten else mixed
        for name, values in zip(("advantages", "returns", "cost_returns"), (mixed, returns, cost_returns)):
            assert found[name][row].tolist() == pytest.approx(values, abs=1e-5), (row, name)
    costs = [cost for cost in COSTS if not math.isnan(cost)]
    assert metrics["cost/mean"] == pytest.approx(statistics.fmean(costs), rel=1e-6)
    assert metrics["cost/multiplier"] == pytest.approx(FACTOR) and metrics["reward/failed"] == 1


@pytest.mark.parametrize("split", [[[4, 0], [3], [1, 2]], [[], [0, 1, 2, 3, 4]]])
def test_does_not_depend_on_who_holds_what(split):
    """The sums of all ranks, one collective after another, played back to each."""
    whole, whole_metrics = algorithm(True).compute_advantages(inputs_of(list(range(5))))
    totals: list[torch.Tensor] = []
    while True:  # each round gets one further collective's total
        contributions, found = [], []
        for rows in split:
            calls = iter(totals)

            def total(mine, calls=calls):
                known = next(calls, None)
                if known is None:
                    contributions.append(mine.clone())
                    raise ZeroDivisionError
                return known.clone()

            try:
                found.append(algorithm(True).compute_advantages(inputs_of(rows, total)))
            except ZeroDivisionError:
                pass
        if len(found) == len(split):
            break
        assert len(contributions) == len(split), "every rank must take part in a collective"
        totals.append(sum(contributions))
    parts = whole["advantages"].split(LENGTHS)
    for rows, (columns, _) in zip(split, found):
        expected = torch.cat([torch.zeros(0), *(parts[row] for row in rows)])
        torch.testing.assert_close(columns["advantages"], expected, rtol=0, atol=2e-6)
    combined = combine(metrics for _, metrics in found)
    assert combined == pytest.approx(whole_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("whiten", [True, False])
def test_the_recomputation_agrees(whiten):
    columns, _ = algorithm(whiten).compute_advantages(inputs_of(list(range(5))))
    made = {name: column.split(LENGTHS) for name, column in (columns | make_columns()).items()}
    reference = ReferenceInputs(
        rewards=dict(enumerate(REWARDS)),
        positions={row: row for row in range(5)},
        groups={row: range(5) for row in range(5)},
        samples=range(5),
        columns=lambda sample, name: made[name][sample],
        kl_coef=0.0,
        lengths=dict(enumerate(LENGTHS)),
        scores=StepScores({"correct": REWARDS, "cost": COSTS}, {"correct": 1.0, "cost": 0.0}, FACTOR),
    )
    sums = algorithm(whiten).reference_sums(reference)
    assert (sums is None) == (not whiten)
    reference = ReferenceInputs(
        **{name: getattr(reference, name) for name in reference.__slots__} | {"sums": sums or ()}
    )
    for row in range(5):
        for name, expected in algorithm(whiten).reference_advantages(reference, row).items():
            found = made[name][row].tolist()
            assert found == pytest.approx(list(expected.values), abs=1e-5, nan_ok=True)
            assert all(size >= 0 for size in expected.magnitudes)


def test_the_multiplier_moves_by_its_own_size():
    """ln lambda += lr lambda (cost - limit): 2310.12773, eq. 31."""
    multiplier = LagrangeMultiplier(start=2.0, lr=0.1, limit=0.5, largest=4.0)
    multiplier.update(1.5)
    assert multiplier.value == pytest.approx(2 * math.exp(0.2))
    state = multiplier.state_dict()
    multiplier.update(0.0)
    assert multiplier.value == pytest.approx(2 * math.exp(0.2) * math.exp(-0.1 * 2 * math.exp(0.2) * 0.5))
    multiplier.load_state_dict(state)
    multiplier.update(100.0)
    assert multiplier.value == 4.0


@pytest.mark.parametrize("cost", [1e9, -1e9])
def test_a_multiplier_that_is_far_out_comes_back(cost):
    """Neither a cost far above the limit nor one far below it leaves a multiplier that cannot move."""
    multiplier = LagrangeMultiplier(start=1.0, lr=1e300, limit=0.0, largest=4.0)
    multiplier.update(cost)
    first = multiplier.value
    assert 0 < first <= 4
    multiplier.update(-cost)
    assert multiplier.value != first


def test_a_first_multiplier_above_the_bound_is_refused():
    (error,) = Lagrangian(lagrange_init=8.0).step_errors(16)
    assert error == "--lagrange-init (8): must be at most --lagrange-max (5). Try --lagrange-max 16."


def test_a_missing_cost_is_named():
    inputs = inputs_of([0])
    with pytest.raises(
        ValueError, match=r"--cost-score \(harm\): the scores of the reward are correct, cost"
    ):
        Lagrangian(cost_score="harm").compute_advantages(inputs)


def test_a_response_without_the_cost_is_no_response_without_cost():
    """Groups may have scores of different names, and a score that is missing must not count as 0."""
    scores = StepScores(
        {"correct": REWARDS, "cost": [0.2, math.nan, math.nan, 0.0, 0.7]},
        {"correct": 1.0, "cost": 0.0},
        FACTOR,
    )
    with pytest.raises(ValueError, match=r"--cost-score \(cost\): .* are correct, for 1 of 5 responses"):
        algorithm(True).compute_advantages(replace(inputs_of(list(range(5))), scores=scores))


def test_a_step_without_rewards_measures_no_cost():
    """The multiplier stays: its owner moves it by a metric that is there."""
    nothing = [math.nan] * 5
    scores = StepScores({"correct": nothing, "cost": nothing}, {"correct": 1.0, "cost": 0.0}, FACTOR)
    inputs = replace(inputs_of(list(range(5))), rewards=torch.tensor(nothing), scores=scores)
    columns, metrics = algorithm(True).compute_advantages(inputs)
    assert (columns["advantages"] == 0).all() and "cost/mean" not in metrics
    assert metrics["cost/multiplier"] == pytest.approx(FACTOR)


def test_the_pid_rule_is_that_of_its_paper():
    """Algorithm 2 of 2007.03964, in a loop of its own: lambda = max(0, kp excess + ki integral + kd growth), with an
    integral and a growth of at least 0."""
    lr, kp, kd, limit, start = 0.5, 2.0, 3.0, 1.0, 0.25
    costs = [1.5, 1.0, 0.2, 0.1, 1.2, 1.4, 9.0]
    multiplier = PIDMultiplier(start, lr, limit, largest=8.0, kp=kp, kd=kd)
    integral, found, expected = start / lr, [], []
    for step, cost in enumerate(costs):
        if step == 4:  # a resumed run
            resumed = PIDMultiplier(start, lr, limit, largest=8.0, kp=kp, kd=kd)
            resumed.load_state_dict(multiplier.state_dict())
            multiplier = resumed
        multiplier.update(cost)
        found.append(multiplier.value)
        integral = max(0.0, integral + cost - limit)
        growth = max(0.0, cost - costs[step - 1]) if step else 0.0
        expected.append(min(8.0, max(0.0, kp * (cost - limit) + lr * integral + kd * growth)))
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0.0 in found and 8.0 in found


def test_gains_need_the_pid_rule():
    (error,) = Lagrangian(lagrange_kp=2.0).step_errors(16)
    assert error.startswith("--lagrange-kp (2): has no effect without --lagrange-update pid.")
    assert not [*Lagrangian(lagrange_kp=2.0, lagrange_update="pid").step_errors(16)]


def test_a_run_may_change_the_rule():
    """A multiplier of 0, where the PID rule had it, must not stay 0 for ever."""
    pid = PIDMultiplier(1.0, 0.1, 1.0, largest=5.0, kp=9.0, kd=0.0)
    pid.update(0.0)
    assert pid.value == 0.0
    other = LagrangeMultiplier(start=1.0, lr=0.1, limit=1.0, largest=5.0)
    other.load_state_dict(pid.state_dict())
    other.update(2.0)
    assert other.value == pytest.approx(math.exp(0.1))
    pid.load_state_dict(other.state_dict())
    assert pid.value == other.value

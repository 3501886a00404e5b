"""A PPO step does not depend on where its roles are. `pytest tests/trainer/test_ppo_layouts.py -m nightly`"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megarl.role_names import with_suffix
from tests.launch import run_ranks
from tests.trainer.run_ppo_layouts import PLACEMENTS, STEPS, TWO_ACTORS, WORLD_SIZE

# fp32 sums in other orders: 1e-6 of a gradient, more of a small one, which Adam makes as large a step as of
# any other. So weights after eight updates differ by some 1e-3 of eight steps of 1e-4 (critic: 3e-4), of
# weights of 0.2.
RELATIVE, OF_WEIGHTS = 1e-5, 1e-4
REPORTED = (
    "policy/loss",
    "critic/loss",
    "policy/grad_norm",
    "critic/grad_norm",
    "policy/kl",
    "critic/value_mean",
    "critic/return_mean",
    "critic/explained_variance",
    "kl/per_response",
    "kl/coef",
    "advantage/max_abs",
    "reward/mean",
    "reward/failed",
)


pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def placements(tmp_path_factory, sums_data) -> Path:
    folder = tmp_path_factory.mktemp("placements")
    script = Path(__file__).with_name("run_ppo_layouts.py")
    run_ranks(WORLD_SIZE, lambda rank: ["-P", script, folder, rank, sums_data], timeout=150)
    return folder


def metrics(folder: Path, placement: str) -> list[dict]:
    return json.loads((folder / placement / "metrics.json").read_text())


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "one"])
def test_losses_and_gradient_norms_are_those_of_one_rank(placements, placement):
    expected, found = metrics(placements, "one"), metrics(placements, placement)
    assert len(expected) == len(found) == STEPS
    for of_one, here in zip(expected, found, strict=True):
        for name in REPORTED:
            assert here[name] == pytest.approx(of_one[name], rel=RELATIVE, abs=1e-7), (placement, name)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "one"])
def test_updated_weights_are_those_of_one_rank(placements, placement, role):
    """Adam turns what is only rounding noise in a gradient into a part of a step: observed 1.4e-5 of a
    tensor's largest weight, 9e-6 on another CPU."""
    expected, found = (load_file(placements / p / role / "model.safetensors") for p in ("one", placement))
    assert expected.keys() == found.keys() and ("score.weight" in found) == (role == "critic")
    for name, weight in expected.items():
        error = (found[name] - weight).abs().max() / weight.abs().max()
        assert error <= OF_WEIGHTS, f"{name}: {error:.1e}"


@pytest.mark.parametrize("placement", TWO_ACTORS)
@pytest.mark.parametrize("suffix, alone", [("", "one"), ("_2", "second_tp2")])
def test_two_actors_in_one_world_do_bit_for_bit_what_each_does_alone(placements, placement, suffix, alone):
    """With other layouts, seeds, Adam and lambdas, on ranks of their own and on the same."""
    expected, found = metrics(placements, alone), metrics(placements, placement)
    assert len(expected) == len(found) == STEPS
    for by_itself, here in zip(expected, found, strict=True):
        names = [
            name
            for name in by_itself
            if name.split("/")[0] in ("policy", "critic", "reward", "response", "kl", "advantage", "mismatch")
        ]
        assert len(names) > 20
        assert {name: here[with_suffix(name, suffix)] for name in names} == {
            name: by_itself[name] for name in names
        }
    for role in ("actor", "critic"):
        weights = [
            load_file(placements / p / r / "model.safetensors")
            for p, r in ((alone, role), (placement, role + suffix))
        ]
        assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items()), role


def test_an_actor_that_learns_from_the_samples_of_another_becomes_what_that_becomes(placements):
    """The student has the same weights, flags and layout on another rank: samples, log-probs of the reference
    and advantages came there."""
    for by_itself, here in zip(metrics(placements, "one"), metrics(placements, "student"), strict=True):
        names = [name for name in by_itself if name.startswith("policy/")]
        assert {name: here[with_suffix(name, "_2")] for name in names} == {
            name: by_itself[name] for name in names
        }
        assert "reward_2/mean" not in here and "critic_2/loss" not in here
    teacher, student, alone = (
        load_file(placements / f / "model.safetensors")
        for f in ("student/actor", "student/actor_2", "one/actor")
    )
    assert all(weight.equal(student[name]) and weight.equal(alone[name]) for name, weight in teacher.items())


def test_the_two_actors_differ(placements):
    (first, _), (second, _) = metrics(placements, "one"), metrics(placements, "second_tp2")
    assert (
        abs(first["policy/loss"] - second["policy/loss"]) > 1e-4
        and abs(first["critic/loss"] - second["critic/loss"]) > 1e-4
    )


def test_while_the_critic_warms_up_the_actor_stays_as_it_is(placements):
    """The first step's critic is that of a run without warm-up; in the second the actor is still the
    reference, but for rounding."""
    (first, second), (of_one, of_second) = metrics(placements, "warm_up"), metrics(placements, "one")
    assert "policy/loss" not in first and first["critic/loss"] == of_one["critic/loss"]
    assert (
        second["policy/grad_norm"] > 0
        and abs(second["kl/per_response"]) < 1e-5 < of_second["kl/per_response"]
    )


def test_the_steps_changed_something(placements):
    """Losses of zero would agree everywhere."""
    first, last = metrics(placements, "one")
    assert (
        abs(first["policy/loss"] - last["policy/loss"]) > 1e-4
        and first["critic/loss"] > 1e-3
        and first["reward/failed"] == 1
    )
    assert first["kl/coef"] == pytest.approx(0.05) and last["kl/coef"] != pytest.approx(0.05)

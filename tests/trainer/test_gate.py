"""The gate's rule: what is accepted of the differences between trainer and engine, and what the error shows.

Whole jobs: tests/e2e/test_grpo_job.py. Real faults: tests/faults/test_graded_faults.py.

    pytest tests/trainer/test_gate.py"""

import dataclasses
import math

import pytest

from megarl.algorithms import REGISTRY
from megarl.gate_limits import GateLimits
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.gate_limits import exceeded, gate_error
from megarl.trainer.gate import GateError


def step(
    mean=5.8e-7, maximum=1.22e-4, outliers=0, tokens=3000, log_prob=0.25, clipped=None
) -> dict[str, float]:
    """The metrics of a step. Default: the worst that healthy jobs in fp32 have shown, in the mean and at a
    single token."""
    return {
        "mismatch/mean_abs": mean,
        "mismatch/clipped_abs": mean if clipped is None else clipped,
        "mismatch/max_abs": maximum,
        "mismatch/outliers": outliers,
        "mismatch/tokens": tokens,
        "mismatch/log_prob_abs": log_prob,
    }


IN_BF16 = step(mean=2.7e-3, maximum=8.5e-2)
NAN = math.nan
U = 2**-23 * math.sqrt(2)


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> ModelShape:
    from sums.model import write_model_folder

    folder = tmp_path_factory.mktemp("model")
    write_model_folder(str(folder), 0)
    return ModelShape.load(folder)


@pytest.fixture
def limits(shape):
    """limits("--flag value ...", field=value, ...) of a job with these flags and a model of two layers with
    these fields."""
    required = "--algorithm grpo --model m --train-data d.jsonl --save s --train-iters 1"
    return lambda flags="", **fields: GateLimits.of(
        load_config(f"{required} {flags}".split(), REGISTRY), dataclasses.replace(shape, **fields)
    )


def test_healthy_steps_pass(limits):
    assert gate_error(step(), limits()) is None
    assert (
        gate_error(step(mean=3e-6, maximum=1.2e-4, tokens=40, log_prob=0.0), limits()) is None
    )  # one token of few
    assert gate_error(IN_BF16, limits("--bf16")) is None and gate_error(IN_BF16, limits()) is not None


def test_in_bf16_the_mean_is_judged_up_to_one_unit(limits):
    accepted = limits("--bf16").accepted(IN_BF16)
    assert (
        accepted["clipped_abs"] == pytest.approx(2**-7 * math.sqrt(2) * (1 + 4 * 64 / 3000))
        and accepted["max_abs"] == math.inf
    )
    assert exceeded(step(mean=2e-2, maximum=8.5e-2), limits("--bf16")) == ["clipped_abs"]


@pytest.mark.parametrize(
    "fault, names",
    [
        (
            {"mean": 1.2e-5},
            ["clipped_abs"],
        ),  # every token a little; 256 u (0.25 + 0.01) + 4 x 1024 u / 3000 = 1.15e-5
        ({"mean": 1.1e-5}, []),
        ({"mean": 1.1e-5, "log_prob": 0.02}, ["clipped_abs"]),  # too much for a model that is so sure
        (
            {"mean": 5e-5, "log_prob": 5.0},
            ["clipped_abs"],
        ),  # too much for any: 256 u + 4 x 1024 u / 3000 = 4.34e-5
        ({"outliers": 5}, ["outliers"]),  # some tokens; 4 + 3000 / 10,000 are accepted
        ({"outliers": 4}, []),
        ({"maximum": 3e-2}, ["max_abs"]),  # one token; padded vocabulary makes 3e-2
        ({"mean": NAN, "maximum": NAN}, ["clipped_abs", "max_abs"]),
        ({"mean": math.inf, "clipped": 1e-6, "maximum": math.inf}, ["max_abs"]),
        ({"log_prob": NAN}, ["clipped_abs"]),
    ],
)
def test_each_statistic_has_its_limit(limits, fault, names):
    assert exceeded(step(**fault), limits()) == names


def test_the_unit_follows_from_dtype_and_depth(limits):
    assert limits().unit == U and limits(num_layers=32).unit == 4 * U
    for flags in ("--bf16", "--rollout-dtype bfloat16", "--rollout-dtype float16"):  # on either side
        assert limits(flags).unit == 2**-7 * math.sqrt(2)
    shallow, deep = limits().accepted(step()), limits(num_layers=32).accepted(step())
    assert deep == {
        "clipped_abs": pytest.approx(4 * shallow["clipped_abs"]),
        "outliers": shallow["outliers"],
        "max_abs": 4 * shallow["max_abs"],
    }


def test_a_choice_of_other_experts_is_no_fault(limits):
    """A router's tie that rounding decides changes some log-probs by much; not where the engine's choice is
    replayed."""
    experts = {"num_moe_experts": 4, "moe_router_topk": 2}
    flipped = step(mean=2e-3, clipped=2e-6, maximum=0.7, outliers=30)
    assert gate_error(flipped, limits(**experts)) is None
    assert exceeded(flipped | {"mismatch/outliers": 35}, limits(**experts)) == ["outliers"]
    assert exceeded(flipped, limits("--moe-routing-replay engine", **experts)) == ["outliers", "max_abs"]


def test_a_number_replaces_the_rule(limits):
    wild = step(mean=0.1, maximum=3.0, outliers=3000)
    assert exceeded(wild, limits("--gate-max-abs 4")) == ["clipped_abs"]
    assert exceeded(wild, limits("--gate-mean-abs 0.2")) == ["outliers", "max_abs"]
    assert exceeded(wild, limits("--gate-max-abs inf --gate-mean-abs inf")) == []
    assert limits("--gate-max-abs 2.9 --gate-mean-abs 0.2").accepted(wild) == {
        "mean_abs": 0.2,
        "max_abs": 2.9,
    }
    assert exceeded(IN_BF16, limits("--bf16 --gate-max-abs 0.08")) == ["max_abs"]  # in bf16 too, if asked


def test_the_error_shows_what_is_above_which_limit_and_why(limits):
    lines = gate_error(step(mean=1.16123456e-5), limits()).splitlines()
    assert lines[0].startswith("trainer and engine disagree on 3000 sampled tokens by more than rounding.")
    assert (
        lines[1] == "  mismatch/clipped_abs 1.16123456e-05, accepted "
        f"{(256 * 0.26 + 4 * 1024 / 3000) * U:.9g}: TOO LARGE"
    )
    assert lines[2:4] == [
        "  mismatch/outliers 0, accepted 4.3",
        f"  mismatch/max_abs 0.000122, accepted {65536 * U:.9g}",
    ]
    assert (
        "(256 x min(mean log-prob + 0.01, 1) + 4 x 1024 / tokens) u" in lines[4]
        and "u = 2^-23 x sqrt(2 layers) = 1.69e-07" in lines[4]
    )


def test_the_error_shows_the_worst_tokens_first():
    """With all digits that an fp32 number has: the two differ in the fifth."""
    tokens = [
        {"sample_id": i, "token": 7, "position": 3, "trainer": -2.069623, "engine": -2.069623 + gap}
        for i, gap in enumerate([0.1, 0.5, -0.9, 0.2, 0.000121, 0.3])
    ]
    lines = str(GateError("they disagree", tokens)).splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "they disagree",
        *(f"  sample {i}" for i in (2, 1, 5, 3, 0)),
    ]
    (line,) = str(GateError("they disagree", tokens[4:5])).splitlines()[1:]
    assert (
        line == "  sample 4, token 7 at position 3: trainer -2.069623, engine -2.069502, difference -0.000121"
    )


@pytest.mark.parametrize(
    "flags, of_mean, limit",
    [
        ("", False, 65536 * U),
        ("--gate-max-abs 0.5", False, 0.5),
        ("--rollout-dtype bfloat16", False, 65536 * U),
        ("--bf16", True, 2**-7 * math.sqrt(2)),
        ("--bf16 --gate-mean-abs 0.5", True, 0.5),
    ],
)
def test_a_gpu_may_round_as_much_between_two_passes_of_the_trainer(shape, flags, of_mean, limit):
    import torch

    from megarl.workers.pass_limit import log_prob_limit

    config = load_config(
        f"--algorithm grpo --model m --train-data d.jsonl --save s --train-iters 1 {flags}".split(), REGISTRY
    )
    assert log_prob_limit(config, shape, torch.device("cpu")).limit == 0
    found = log_prob_limit(config, shape, torch.device("cuda"))
    assert (found.of_mean, found.limit) == (of_mean, limit)

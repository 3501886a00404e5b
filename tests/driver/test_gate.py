"""The gate's verdicts: which difference is judged, at which limit, and what the error shows. Whole jobs: tests/e2e/test_grpo_job.py.

pytest tests/driver/test_gate.py"""

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.driver.gate import GateError, gate_finding

FP32 = {"mismatch/mean_abs": 1e-6, "mismatch/max_abs": 5e-5}
BF16 = {"mismatch/mean_abs": 2.7e-3, "mismatch/max_abs": 8.5e-2}


@pytest.fixture
def finding():
    """finding(mismatch, "--flag value ...") of a job with these flags."""
    required = "--algorithm grpo --model m --train-data d.jsonl --save s --train-iters 1"
    return lambda mismatch, flags="": gate_finding(
        mismatch, load_config(f"{required} {flags}".split(), REGISTRY)
    )


def test_fp32_is_judged_by_its_worst_token(finding):
    assert finding(FP32) is None
    assert finding(FP32 | {"mismatch/max_abs": 1e-4}) is None
    told = finding(FP32 | {"mismatch/max_abs": 3e-2})  # padded vocabulary in one softmax only
    assert "mismatch/max_abs (0.03) is above --gate-max-abs (0.0001)" in told
    assert finding(FP32 | {"mismatch/max_abs": 3e-2}, "--gate-max-abs 0.05") is None


@pytest.mark.parametrize("flags", ["--bf16", "--rollout-dtype bfloat16", "--rollout-dtype float16"])
def test_half_precision_on_either_side_is_judged_by_the_mean(finding, flags):
    assert finding(BF16, flags) is None and finding(BF16) is not None
    assert "mismatch/mean_abs (0.02) is above --gate-mean-abs (0.01)" in finding(
        BF16 | {"mismatch/mean_abs": 2e-2}, flags
    )
    assert finding(BF16, f"{flags} --gate-mean-abs 0.002") is not None


@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_what_is_not_a_number_does_not_pass(finding, flags):
    assert finding({"mismatch/mean_abs": float("nan"), "mismatch/max_abs": float("nan")}, flags) is not None


def test_the_error_shows_the_worst_tokens_first():
    tokens = [
        {"sample_id": i, "token": 7, "position": 3, "trainer": -1.0, "engine": -1.0 - gap}
        for i, gap in enumerate([0.1, 0.5, -0.9, 0.2, 0.0, 0.3])
    ]
    lines = str(GateError("they disagree", tokens)).splitlines()
    assert (
        lines[0] == "they disagree"
        and lines[1] == "  sample 2, token 7 at position 3: trainer -1.000000, engine -0.100000"
    )
    assert [line.split(",")[0] for line in lines[1:]] == [f"  sample {i}" for i in (2, 1, 5, 3, 0)]

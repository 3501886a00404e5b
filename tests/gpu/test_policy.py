"""Policy and critic on a GPU against the same on the CPU, in fp32 and bf16 (run_policy.py, one process each).

pytest tests/gpu/test_policy.py
MEGARL_GPU_REHEARSAL=cpu pytest tests/gpu/test_policy.py     without a GPU: the CPU plays its part"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch

DEVICE = "cpu" if os.environ.get("MEGARL_GPU_REHEARSAL") == "cpu" else "cuda"
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")
CASES = [f"{model}, {dtype}" for model in ("policy", "critic") for dtype in ("fp32", "bf16")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> tuple[dict, dict]:
    """(what the GPU computed, what the CPU computed)"""
    return tuple(run(device, tmp_path_factory.mktemp(device)) for device in (DEVICE, "cpu"))


def run(device: str, folder: Path) -> dict:
    script = Path(__file__).with_name("run_policy.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), device, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / f"{device}.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_forward_pass_agrees(reports, case):
    """In fp32 sums of 768 products at a magnitude of 8 round by about 1e-5; TF32, which must be off, would
    be at 1e-3. In bf16 the two dtypes differ by 4e-3 (policy) and 7e-3 (critic) on average on a CPU; two
    roundings of another order are of that size."""
    gpu, cpu = (report[case]["before"] for report in reports)
    differences = [abs(a - b) for a, b in zip(gpu, cpu, strict=True)]
    assert max(differences) < 1e-4 if "fp32" in case else mean(differences) < 2e-2


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradient_norms_agree(reports, case):
    """The first update's, before rounding has been through Adam; later ones, loosely."""
    limit = 1e-4 if "fp32" in case else 2e-2
    for key in ("loss", "grad_norm"):
        gpu, cpu = (report[case][key] for report in reports)
        assert gpu[0] == pytest.approx(cpu[0], rel=limit), key
        assert gpu == pytest.approx(cpu, rel=0.05), key


@pytest.mark.parametrize("case", CASES)
def test_updates_lead_to_the_same_model(reports, case):
    """Three updates move each number by 1.4 (critic) or 3 (policy). Adam moves a weight whose gradient is
    rounding noise by a whole learning rate, either way, so that some distance remains."""
    gpu, cpu = reports[0][case], reports[1][case]
    moved = mean(abs(a - b) for a, b in zip(cpu["after"], cpu["before"], strict=True))
    apart = mean(abs(a - b) for a, b in zip(gpu["after"], cpu["after"], strict=True))
    assert moved > 1, "the updates change the model"
    assert apart < (0.01 if "fp32" in case else 0.05) * moved

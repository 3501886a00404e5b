"""Every layout gives the numbers of one rank, and one rank gives those of transformers.

One torchrun job with two ranks (run_layouts.py, about 30 s) does all the work; these tests read what it wrote. Mutations that
made them fail: norm weights not marked sequence_parallel, temperature left out, tensor_model_parallel marks removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.cases import CASES, FAMILY_LAYOUTS, run_ranks

SPLIT = [(family, layout) for family, layout in CASES if layout != "one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("layouts")
    run_ranks("run_layouts.py", out, 2)
    return out


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict]:
    return [json.loads((folder / f"report_{rank}.json").read_text()) for rank in (0, 1)]


def combined(reports: list[dict], case: str) -> tuple[float, list[dict]]:
    """Largest log-prob error of any rank, and per update the metrics summed over ranks."""
    parts = [r[case] for r in reports if case in r]
    error = max(p["log_prob_error"] for p in parts if "log_prob_error" in p)
    updates = [{"loss": sum(p["updates"][i].get("loss", 0.0) for p in parts),
                "grad_norm": sum(p["updates"][i].get("policy/grad_norm", 0.0) for p in parts)} for i in range(2)]  # fmt: skip
    return error, updates


@pytest.mark.parametrize("family, layout", SPLIT)
def test_losses_and_gradient_norms_equal_one_rank(reports, family, layout):
    _, reference = combined(reports, f"{family}/one/60/a")
    _, updates = combined(reports, f"{family}/{layout}/60/a")
    for got, wanted in zip(updates, reference, strict=True):
        # The second update sees the first one's weights. Observed <= 5e-7.
        assert got["loss"] == pytest.approx(wanted["loss"], abs=2e-6)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=2e-6)


@pytest.mark.parametrize("family", [family for family, layouts in FAMILY_LAYOUTS.items() if "one_bf16" in layouts])
@pytest.mark.parametrize("layout", ("one_bf16", "dp2_bf16"))
def test_bf16_gradients_are_those_of_fp32_rounded(reports, family, layout):
    """Several micro-batches accumulate in fp32, tied embeddings included: a gradient added twice or lost would be off by a third or more."""
    error, updates = combined(reports, f"{family}/{layout}/60/a")
    _, reference = combined(reports, f"{family}/one/60/a")
    assert error <= 0.2  # bf16 has 8 bits: log-probs of about 5 differ by a few hundredths
    assert updates[0]["grad_norm"] == pytest.approx(reference[0]["grad_norm"], rel=0.03)


@pytest.mark.parametrize("layout", ("one", "dp2"))
@pytest.mark.parametrize("packing", ("1000000/a", "1000000/b", "17/c"))
def test_micro_batch_size_and_packing_order_change_nothing(reports, layout, packing):
    _, reference = combined(reports, "qwen3/one/60/a")
    _, updates = combined(reports, f"qwen3/{layout}/{packing}")
    for got, wanted in zip(updates, reference, strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("family, layout", CASES)
def test_updated_weights_equal_one_rank(folder, family, layout):
    start, reference = load_file(folder / family / "model.safetensors"), load(folder, family, "one")
    for name, value in load(folder, family, layout).items():
        # Adam with eps 1e-5, two steps of lr 1e-2: rounding of the gradient shows at about 1e-5 (facts of the layouts).
        torch.testing.assert_close(value, reference[name], atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert (value - start[name]).abs().max() > 1e-3, f"{name} was not trained"


def load(folder: Path, family: str, layout: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{family}_{layout}_60_a_updated" / "model.safetensors")

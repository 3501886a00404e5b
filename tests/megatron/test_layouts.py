"""Every layout gives the log-probs of transformers, and comes back to its Hugging Face folder bit by bit.

One torchrun job with two ranks (run_layouts.py, about 20 s) does all the work; these tests read what it wrote. Mutations that
made them fail: temperature left out, another head order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.cases import CASES, run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("layouts")
    run_ranks("run_layouts.py", out, 2)
    return out


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict]:
    return [json.loads((folder / f"report_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("family, layout", CASES)
def test_log_probs_equal_transformers(reports, family, layout):
    # fp32: observed 1.4e-6 to 2.9e-6; a wrong rope, norm, head order or temperature is above 1e-2.
    parts = [report[f"{family}/{layout}"] for report in reports if f"{family}/{layout}" in report]
    assert max(part["log_prob_error"] for part in parts if part) <= 1e-5


@pytest.mark.parametrize("family, layout", CASES)
def test_hugging_face_round_trip_is_bit_equal(folder, family, layout):
    original = load_file(folder / family / "model.safetensors")
    back = load_file(folder / f"{family}_{layout}_roundtrip" / "model.safetensors")
    assert back.keys() == original.keys()
    for name, value in back.items():
        assert torch.equal(value, original[name]), name


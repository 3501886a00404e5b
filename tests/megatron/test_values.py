"""A value model gives transformers' ...ForSequenceClassification's numbers in every layout. How it trains:
test_equivalence.py.

One torchrun job with four ranks (run_values.py, about 15 s) does all the work; these tests read what it
wrote.

    pytest tests/megatron/test_values.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.cases import VALUE_CASES, VALUE_LAYOUTS, run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("values")
    run_ranks("run_values.py", out, 4)
    return out


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict]:
    return [json.loads((folder / f"report_{rank}.json").read_text()) for rank in range(4)]


def of_case(reports: list[dict], family: str, layout: str) -> list[dict]:
    return [r[f"{family}/{layout}"] for r in reports if f"{family}/{layout}" in r]


@pytest.mark.parametrize("family, layout", VALUE_CASES)
@pytest.mark.parametrize("error", ("value_error", "score_error"))
def test_values_and_scores_equal_transformers(reports, family, layout, error):
    # fp32, values of about 1, observed <= 1.8e-6: another order of sums. One token further, or another head,
    # is off by more than 0.1.
    errors = [part[error] for part in of_case(reports, family, layout) if error in part]
    assert errors and max(errors) <= 1e-5


def test_bf16_values_are_those_of_fp32_rounded(reports):
    (part,) = of_case(reports, "qwen3", "one_bf16")
    assert (
        part["value_error"] <= 0.1 and part["score_error"] <= 0.1
    )  # bf16 has 8 bits: values of about 1 through four layers


def test_a_head_that_no_folder_has_starts_at_zero(reports):
    assert of_case(reports, "qwen3", "fresh") == [{"loaded": 0.0, "random": 0.0}] * 2


@pytest.mark.parametrize("family, layout", VALUE_CASES)
def test_hugging_face_round_trip_is_bit_equal(folder, family, layout):
    original, back = (
        load_file(folder / family / "model.safetensors"),
        load(folder, family, layout, "roundtrip"),
    )
    assert back.keys() == original.keys() and "score.weight" in back
    assert [name for name in back if not torch.equal(back[name], original[name])] == []


@pytest.mark.parametrize("family", VALUE_LAYOUTS)
def test_transformers_loads_an_export(folder, family):
    from transformers import AutoModelForSequenceClassification

    model, loading = AutoModelForSequenceClassification.from_pretrained(
        folder / f"{family}_one_roundtrip", output_loading_info=True
    )
    assert model.config.num_labels == 1 and not any(
        loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )


def load(folder: Path, family: str, layout: str, kind: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{family}_{layout}_{kind}" / "model.safetensors")

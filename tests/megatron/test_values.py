"""A value model gives transformers' ...ForSequenceClassification's numbers, and those of one rank in every layout.

One torchrun job with four ranks (run_values.py, about 30 s) does all the work; these tests read what it wrote. Mutations that made
them fail: under sequence parallelism the gradient of the values summed over ranks instead of split, and the head not marked
sequence_parallel; the head marked tensor_model_parallel, so that the gradient norm counts it once per rank.

    pytest tests/megatron/test_values.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.cases import VALUE_CASES, VALUE_LAYOUTS, run_ranks

SPLIT = [(family, layout) for family, layout in VALUE_CASES if layout != "one"]
WHOLE_GRADIENTS = [(family, layout) for family, layout in SPLIT if layout != "dp2_sharded"]


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


def updates(reports: list[dict], family: str, layout: str) -> list[dict[str, float]]:
    """Per update the metrics summed over ranks."""
    parts = of_case(reports, family, layout)
    return [{name: sum(p["updates"][i].get(name, 0.0) for p in parts) for name in ("loss", "critic/grad_norm", "critic/lr")} for i in range(2)]


@pytest.mark.parametrize("family, layout", VALUE_CASES)
@pytest.mark.parametrize("error", ("value_error", "score_error"))
def test_values_and_scores_equal_transformers(reports, family, layout, error):
    # fp32, values of about 1, observed <= 1.8e-6: another order of sums. One token further, or another head, is off by more than 0.1.
    errors = [part[error] for part in of_case(reports, family, layout) if error in part]
    assert errors and max(errors) <= 1e-5


@pytest.mark.parametrize("family, layout", SPLIT)
def test_losses_and_gradient_norms_equal_one_rank(reports, family, layout):
    for got, wanted in zip(updates(reports, family, layout), updates(reports, family, "one"), strict=True):
        # The second update sees the first one's weights. Observed <= 6e-7 of losses up to 1.9, and 1e-6 of the norm.
        assert got["loss"] == pytest.approx(wanted["loss"], abs=1e-6, rel=1e-6)
        assert got["critic/grad_norm"] == pytest.approx(wanted["critic/grad_norm"], rel=2e-6)
        assert got["critic/lr"] == wanted["critic/lr"] == 1e-2  # one rank of the mesh reports it


@pytest.mark.parametrize("family, layout", WHOLE_GRADIENTS)
def test_gradient_of_every_parameter_equals_one_rank(folder, family, layout):
    reference = load(folder, family, "one", "gradients")
    for name, gradient in load(folder, family, layout, "gradients").items():
        largest = reference[name].abs().max()
        # Relative to the largest element of the parameter; observed <= 4e-6. Rounding: other orders of sums over tokens and heads.
        assert largest > 0 and (gradient - reference[name]).abs().max() <= 1e-5 * largest, name


@pytest.mark.parametrize("family, layout", VALUE_CASES)
def test_updated_weights_equal_one_rank(folder, family, layout):
    start, reference = load_file(folder / family / "model.safetensors"), load(folder, family, "one", "updated")
    for name, value in load(folder, family, layout, "updated").items():
        # Adam with eps 1e-5, two steps of lr 1e-2: rounding of the gradient shows at about 1e-5.
        torch.testing.assert_close(value, reference[name], atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert (value - start[name]).abs().max() > 1e-3, f"{name} was not trained"


@pytest.mark.parametrize("family, layout", VALUE_CASES)
def test_every_copy_of_the_head_stays_the_same(reports, family, layout):
    """Tensor-parallel ranks and data-parallel replicas each make the update: bit-equal."""
    copies = [part["value_head"] for part in of_case(reports, family, layout) if "value_head" in part]
    assert all(copy == copies[0] for copy in copies) and len(copies) == (2 if "2" in layout and layout != "pp2" else 1)


def test_bf16_values_and_gradients_are_those_of_fp32_rounded(reports):
    (part,) = of_case(reports, "qwen3", "one_bf16")
    assert part["value_error"] <= 0.1 and part["score_error"] <= 0.1  # bf16 has 8 bits: values of about 1 through four layers
    got, wanted = (updates(reports, "qwen3", layout)[0]["critic/grad_norm"] for layout in ("one_bf16", "one"))
    assert got == pytest.approx(wanted, rel=0.05)  # accumulated twice, or lost, would be off by a third or more


def test_a_head_that_no_folder_has_starts_at_zero(reports):
    assert of_case(reports, "qwen3", "fresh") == [{"loaded": 0.0, "random": 0.0}] * 2


@pytest.mark.parametrize("family, layout", VALUE_CASES)
def test_hugging_face_round_trip_is_bit_equal(folder, family, layout):
    original, back = load_file(folder / family / "model.safetensors"), load(folder, family, layout, "roundtrip")
    assert back.keys() == original.keys() and "score.weight" in back
    assert [name for name in back if not torch.equal(back[name], original[name])] == []


@pytest.mark.parametrize("family", VALUE_LAYOUTS)
def test_transformers_loads_an_export(folder, family):
    from transformers import AutoModelForSequenceClassification

    model, loading = AutoModelForSequenceClassification.from_pretrained(folder / f"{family}_one_roundtrip", output_loading_info=True)
    assert model.config.num_labels == 1 and not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def load(folder: Path, family: str, layout: str, kind: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{family}_{layout}_{kind}" / "model.safetensors")

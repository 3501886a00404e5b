"""Adapters: one rank gives the numbers of transformers with hand-written LoRA, and every layout those of one
rank; W stays what it was.

One torchrun job with two ranks (run_lora.py, about 20 s) does all the work; these tests read what it wrote.

    pytest tests/megatron/test_lora.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.cases import LORA, LORA_LAYOUTS, LORA_QUICK, run_ranks
from tests.shared import selected_cases, with_nightly

CASES = [(family, layout) for family, layouts in LORA_LAYOUTS.items() for layout in layouts]
SPLIT = [(family, layout) for family, layout in CASES if layout not in ("one", "one_bf16")]
REFERENCES = ("qwen2_tied", "gemma3")  # families that transformers computes too
ADAPTER = "adapter_model.safetensors"


def in_layouts(cases: list[tuple[str, str]]):
    return pytest.mark.parametrize("family, layout", with_nightly(cases, LORA_QUICK))


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lora")
    ones = [f"{family}/one" for family in LORA_LAYOUTS]
    bf16 = ["qwen2_tied/one_bf16"]
    run_ranks(
        "run_lora.py", out, 2, *dict.fromkeys(ones + bf16 + selected_cases(request, "family", "layout"))
    )
    return out


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict]:
    return [json.loads((folder / f"report_{rank}.json").read_text()) for rank in (0, 1)]


def of_case(reports: list[dict], family: str, layout: str) -> list[dict]:
    return [r[f"{family}/{layout}"] for r in reports if f"{family}/{layout}" in r]


def outputs(parts: list[dict], key: str = "outputs") -> dict[str, list[float]]:
    """Sample id -> its log-probs or values, over all replicas."""
    return {i: values for part in parts for i, values in (part[key] or {}).items()}


def distance(got: dict[str, list[float]], wanted: dict[str, list[float]]) -> float:
    assert got.keys() == wanted.keys()
    return max((torch.tensor(got[i]) - torch.tensor(wanted[i])).abs().max().item() for i in wanted)


def totals(parts: list[dict], name: str) -> list[float]:
    return [sum(part["updates"][i].get(name, 0.0) for part in parts) for i in range(2)]


def worst(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, relative to that tensor's largest element."""
    assert got.keys() == wanted.keys() and len(wanted) > 0
    return max(
        ((got[name].double() - w.double()).abs().max() / w.abs().max()).item() for name, w in wanted.items()
    )


@pytest.mark.parametrize("family", REFERENCES)
def test_log_probs_loss_and_gradients_equal_transformers_with_lora(folder, reports, family):
    """fp32 against fp64: observed 2e-6 everywhere. Shared between q, k and v (gate and up), lora_A gets the
    sum of their gradients."""
    reference, (one,) = (
        json.loads((folder / f"{family}_reference.json").read_text()),
        of_case(reports, family, "one"),
    )
    assert distance(outputs([one]), reference["outputs"]) <= 1e-5
    assert one["updates"][0]["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert (
        worst(
            load_file(folder / f"{family}_one_grads" / ADAPTER),
            load_file(folder / f"{family}_reference_grads.safetensors"),
        )
        <= 1e-5
    )


@in_layouts([case for case in CASES if case[0] in REFERENCES and case[1] != "one_bf16"])
def test_adapters_off_is_the_model_that_training_started_from(reports, family, layout):
    assert distance(outputs(of_case(reports, family, layout), "outputs_off"), reports[0][family]) <= 1e-5


@in_layouts(SPLIT)
def test_outputs_losses_and_gradient_norms_equal_one_rank(reports, family, layout):
    one, split = of_case(reports, family, "one"), of_case(reports, family, layout)
    assert distance(outputs(split), outputs(one)) <= 1e-5
    # The second update sees the first one's weights. A replicated adapter that is counted twice, or a split
    # one once, moves the norm.
    assert totals(split, "loss") == pytest.approx(totals(one, "loss"), rel=1e-6)
    prefix = "critic" if family == "critic" else "policy"
    assert totals(split, f"{prefix}/grad_norm") == pytest.approx(totals(one, f"{prefix}/grad_norm"), rel=1e-6)


@in_layouts([case for case in SPLIT if not case[1].endswith("_sharded")])
def test_adapter_gradients_equal_one_rank(folder, family, layout):
    wanted, got = (load_file(folder / f"{family}_{name}_grads" / ADAPTER) for name in ("one", layout))
    assert worst(got, wanted) <= 1e-5


@in_layouts(SPLIT)
def test_weights_after_two_updates_equal_one_rank(folder, family, layout):
    """Adapters, and what an engine would get. A learning rate of 1e-2 moves an element by up to 2e-2."""
    for name, file in (("updated", ADAPTER), ("merged", "model.safetensors")):
        wanted, got = (load_file(folder / f"{family}_{case}_{name}" / file) for case in ("one", layout))
        assert got.keys() == wanted.keys()
        assert max((got[key] - wanted[key]).abs().max().item() for key in wanted) <= 1e-4


@in_layouts(CASES)
def test_base_weights_keep_their_bits_and_cost_no_gradients(reports, family, layout):
    for part in of_case(reports, family, layout):
        assert part["changed"] == [] and part["unchanged"] == []
        # fp32, padded by DDP where it is sharded; Adam's two moments, and under bf16 the fp32 masters
        ranks, masters = 2 if layout == "dp2_sharded" else 1, 1 if layout.endswith("_bf16") else 0
        assert (
            4 * part["adapter_elements"] <= part["bytes"]["gradients"] <= 4 * part["adapter_elements"] + 4096
        )
        assert part["bytes"]["optimizer"] <= (8 + 4 * masters) * part["adapter_elements"] / ranks + 4096
        assert (
            part["output_weight_gradients"] == 0
        )  # the fused loss leaves out the product for a frozen output layer


@in_layouts(CASES)
def test_the_peft_export_added_by_hand_is_the_merged_export(folder, family, layout):
    """W + (alpha / r) B A of the files, in fp32 and rounded once: bit-equal in bf16 but for ties, in fp32 to
    the sum's order."""
    adapter, config = (
        folder / f"{family}_{layout}_updated" / name for name in (ADAPTER, "adapter_config.json")
    )
    config, tensors = json.loads(config.read_text()), load_file(adapter)
    base, merged = (
        load_file(folder / family / "model.safetensors"),
        load_file(folder / f"{family}_{layout}_merged" / "model.safetensors"),
    )
    assert (config["r"], config["lora_alpha"]) == (LORA[family].lora_rank, LORA[family].lora_alpha)
    added = set()
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            assert path.rpartition(".")[2] in config["target_modules"]
            up = tensors[name.replace("lora_A", "lora_B")].float()
            base[f"{path}.weight"] = base[f"{path}.weight"].to(down.dtype).float() + config[
                "lora_alpha"
            ] / config["r"] * (up @ down.float())
            added.add(f"{path}.weight")
    if family == "critic":
        base["score.weight"] = tensors.pop("base_model.model.score.weight")
        assert config["modules_to_save"] == ["score"] and not torch.equal(
            base["score.weight"], torch.zeros_like(base["score.weight"])
        )
        base.pop("lm_head.weight")
    assert len(tensors) == 2 * len(added) > 0
    assert base.keys() == merged.keys()
    for name, weight in merged.items():
        if name in added:
            bound = 1e-6 if weight.dtype == torch.float32 else 2**-8 * weight.float().abs().max().item()
            assert (weight.float() - base[name].float()).abs().max() <= bound, name
        else:
            assert torch.equal(weight, base[name].to(weight.dtype)), name


@pytest.mark.parametrize("family", REFERENCES)
def test_the_merged_model_has_the_log_probs_of_the_adapted_one(reports, family):
    """By transformers, which knows nothing of adapters: the weights that the engine gets."""
    assert (
        distance(outputs(of_case(reports, family, "one")), reports[0][f"{family}_one_merged_start"]) <= 1e-5
    )


def test_bf16_gradients_are_those_of_fp32_rounded(reports):
    one, bf16 = (of_case(reports, "qwen2_tied", layout) for layout in ("one", "one_bf16"))
    assert totals(bf16, "policy/grad_norm")[0] == pytest.approx(totals(one, "policy/grad_norm")[0], rel=0.05)

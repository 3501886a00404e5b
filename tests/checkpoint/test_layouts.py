"""A checkpoint continues bit for bit in the layout that wrote it, and gives any other layout the same
tensors, bit for bit.

Tensors are compared as files, by a reader that knows no ranks (run_checkpoints.py). Mutations that made these
fail: the optimizer's steps not restored, the masters of a bf16 model not loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.checkpoint.load import Checkpoint
from megarl.config.hf_config import ModelShape
from megarl.config.schema import LoRAConfig
from megarl.reshard.atlas import hf_sizes
from megarl.reshard.lora_atlas import adapter_sizes
from tests.checkpoint.cases import CASES

NAMES = [f"{family}/{writer}" for family, writer, _ in CASES]
READERS = [(f"{family}/{writer}", reader) for family, writer, readers in CASES for reader in readers]


def losses(reports: list[dict], updates: list[list[dict] | None]) -> list[float]:
    """Of each update, summed over ranks."""
    return [
        sum(part.get("loss", 0.0) for part in parts)
        for parts in zip(*(u for u in updates if u is not None), strict=True)
    ]


@pytest.mark.parametrize("case", NAMES)
def test_resuming_in_the_same_layout_changes_no_bit(reports, case):
    for report in reports:
        assert (
            report[case]["resumed"] == report[case]["uninterrupted"]
        )  # losses, gradient norms and learning rates of two updates
        assert report[case]["weights_equal"]
        assert report[case]["state"] == {"cursor": 7}


@pytest.mark.parametrize("case, reader", READERS)
def test_another_layout_gets_the_same_tensors(saved: Path, reports, case, reader):
    """All weights and moments, after they were loaded into the other layout's shards and saved from there."""
    family = case.partition("/")[0]
    shape = ModelShape.load(saved / family, value_head="critic" in family)
    adapters = adapter_sizes(shape, LoRAConfig(lora_rank=4)).keys() if "lora" in family else set()
    names = hf_sizes(shape).keys() | adapters
    trained = adapters or [name for name in names if not name.endswith("e_score_correction_bias")]
    assert reports[0][case][reader] | {"next": None} == {
        "different": [],
        "count": len(names) + 2 * len(trained),
        "next": None,
    }


@pytest.mark.parametrize("case, reader", READERS)
def test_training_goes_on_alike_in_another_layout(reports, case, reader):
    wanted = losses(reports, [report[case]["uninterrupted"] for report in reports])
    got = losses(reports, [report[case].get(reader, {}).get("next") for report in reports])
    # fp32: the first loss sees the saved weights, the second what Adam made of the saved moments; observed <=
    # 6e-7 (a loss of 0.01). In bf16 every product is rounded to 8 bits, 4e-3 of log-probs around 1, in an
    # order that the layout and the machine decide: observed 2.1e-3; moments that were lost are found by the
    # test above.
    assert (
        got == pytest.approx(wanted, rel=1e-2, abs=1e-2)
        if "bf16" in case
        else got == pytest.approx(wanted, rel=1e-6)
    )


def test_learning_rate_continues_its_schedule(reports):
    """Three steps of warm-up: the third and fourth step of the job are the first two after loading."""
    rates = [part["policy/lr"] for part in reports[0]["qwen3/tp2_sp"]["resumed"]]
    assert rates[0] == pytest.approx(1e-3) and rates[1] < 1e-3


def test_files_are_shared_out_and_hold_each_element_once(saved: Path):
    """fp32: 4 bytes of a weight and of each of two moments. Both replicas hold everything; each writes a half
    of it."""
    checkpoint = Checkpoint(saved / "qwen3-tp2_sp-dp2")
    sizes = [size for size, _ in checkpoint.manifest.files.values()]
    elements = sum(
        box.area
        for kind in checkpoint.manifest.tensors
        for t in checkpoint.tensors(kind).values()
        for box in [p.box for p in t.parts]
    )
    parameters = sum(
        t.shape[0] * (t.shape[1] if len(t.shape) == 2 else 1) for t in checkpoint.tensors("weights").values()
    )
    assert elements == 3 * parameters and sum(sizes) < 1.1 * 4 * elements
    assert max(sizes) < 1.02 * min(sizes)


def test_masters_are_what_is_saved_of_bf16(saved: Path):
    checkpoint = Checkpoint(saved / "qwen2-dp2+sharded+bf16")
    assert {str(t.dtype) for t in checkpoint.tensors("weights").values()} == {"torch.float32"}
    assert checkpoint.state["dtype"] == "bfloat16" and checkpoint.state["optimizer_steps"] == 2


def test_weights_alone_fill_the_masters_too(reports):
    """Not by way of the model's own bf16, which has 16 bits less."""
    assert [report["weights_only"] for report in reports] == [[], []]


@pytest.mark.parametrize("kind", ("roles", "adapted roles"))
def test_roles_save_and_load_in_their_own_layouts(reports, kind):
    assert [report[kind] for report in reports] == [{"actor": True, "critic": True}] * 2


def test_of_adapters_alone_there_are_moments(saved: Path):
    checkpoint = Checkpoint(saved / "role_actor--lora-rank-4")
    assert (
        {name for name in checkpoint.tensors("weights") if "lora" in name}
        == checkpoint.tensors("exp_avg").keys()
        != set()
    )
    assert checkpoint.tensors("exp_avg").keys() < checkpoint.tensors("weights").keys()


REFUSALS = {
    "exists": "qwen3-dp2+sharded exists; a checkpoint never replaces one.",
    "missing": "nothing is not a megarl checkpoint: it has no checkpoint.json.",
    "other model": "score.weight is missing; lm_head.weight is not a tensor of this model.",
    "flipped": "exp_avg-00001.safetensors is damaged: its SHA-256 is not the one that was written.",
    "disk full": "No space left on device",
    "I/O error": "[rank 1] ",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_every_rank_hears_what_failed_on_one(reports, what):
    assert all(REFUSALS[what] in report["refusals"][what] for report in reports), json.dumps(
        [report["refusals"] for report in reports], indent=1
    )


def test_after_a_failure_nothing_has_changed(reports):
    for report in reports:
        told = report["refusals"]
        assert told["untouched"] == "True"  # the model
        assert told["left"] == "[]"  # of the checkpoint that met a full disk
        assert "weights are whole" not in told and told["loaded"] == "True"  # only the moments were damaged

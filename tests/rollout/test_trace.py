"""The tables of vLLM's layouts are what its loaders do, and a model without a table is traced to what vLLM
itself loads.

One process (run_trace.py, about 12 s) does the work. Everything is exact: atlases are integers, copies change
nothing.

    pytest tests/rollout/test_trace.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import succeed


def trace(folder: Path, *flags: str) -> dict:
    succeed(Path(__file__).with_name("run_trace.py"), folder, *flags, timeout=200, preloaded=True)
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    return trace(tmp_path_factory.mktemp("trace"))


def test_tables_are_what_the_loaders_do(report):
    """Every family with 1, 2 and 4 ranks, of which the last; with 4, two ranks share a key head."""
    assert report["tables"] == []


@pytest.mark.nightly
def test_tables_of_every_rank_are_what_the_loaders_do(tmp_path):
    assert trace(tmp_path, "--every-rank")["tables"] == []


@pytest.mark.parametrize("name", ["phi3", "gemma2", "olmo2", "qwen2_moe"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_model_without_a_table_gets_what_vllm_loads(report, name, tp_size):
    assert report[f"{name} {tp_size}"]["different"] == []
    assert report[f"{name} {tp_size}"]["elements"] > 50_000


def test_a_loader_that_is_no_copy_is_refused(report):
    computes, transposes, skips, adds = report["refusals"]
    assert computes.startswith("w: its loader computes with the checkpoint's tensors (aten.copy_.default)")
    assert transposes.startswith("w: its loader computes with the checkpoint's tensors (aten.copy_.default)")
    assert "t: sizes (4, 2) with strides (4, 2) are no rectangle of its rows" in skips
    assert adds.startswith("w: its loader computes with the checkpoint's tensors (aten.add_")

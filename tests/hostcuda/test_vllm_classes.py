"""Our tables of vLLM's layouts are right for the models that vLLM builds on its CUDA platform.

vLLM's wheels for CUDA and for the CPU have the same Python code. Here its CUDA platform configures it, on the
emulated device (run_vllm_classes.py): models are built on the meta device, and the tensors of a checkpoint go
through their loaders. What vLLM's kernels do with weights after loading is not seen.

    make test-hostcuda ARGS=tests/hostcuda/test_vllm_classes.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import succeed

SCRIPT = Path(__file__).with_name("run_vllm_classes.py")
ON_CPU = {"HOSTCUDA": None, "PYTHONPATH": None}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("cuda", "cpu")}
    succeed("-P", SCRIPT, folders["cuda"], "cuda", timeout=200)
    succeed("-P", SCRIPT, folders["cpu"], "cpu", timeout=200, environment=ON_CPU)
    return {name: json.loads((folder / "report.json").read_text()) for name, folder in folders.items()}


def test_the_platform_is_cuda(reports):
    """Without this the other tests would compare the CPU with itself."""
    assert [reports[name]["platform"] for name in ("cuda", "cpu")] == ["cuda", "cpu"]


def test_tables_are_what_the_loaders_do(reports):
    """Names, shapes and the order of fused parts, of every family with a table, on 1, 2 and 4 ranks."""
    assert reports["cuda"]["tables"] == []


def test_another_order_of_fused_parts_is_found(reports):
    found = reports["cuda"]["planted"]
    assert found and all("self_attn.qkv_proj.weight" in line for line in found)


def test_families_without_a_table_are_traced_to_the_same_atlas(reports):
    """DeepSeek's latent attention and Qwen2-MoE's shared expert, on 1 and 2 ranks."""
    assert reports["cuda"]["traces"] == reports["cpu"]["traces"]
    assert {name.split()[0] for name in reports["cuda"]["traces"]} == {"deepseek_v3", "qwen2_moe"}

"""Models that vLLM cannot run on a kind of machine are refused there, by the lists of the installed vLLM
itself.

pytest tests/checks/test_engine.py"""

import importlib.util
import os
import re
import tempfile
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.checks.job import examine
from megarl.checks.machine import Machine
from megarl.config.installed import cpu_head_sizes, latent_head_sizes
from megarl.config.loader import load_config
from tests.config.test_hf_config import DEEPSEEK_V2
from tests.config.conftest import MIXTURE, QWEN3, job, write_model  # noqa: F401

CPU, GPU = Machine(10**12), Machine(None, has_gpu=True, gpu_bytes=8 * 10**10)


TWO_RANKS = ("--rollout-tensor-parallel-size",)


def findings_of(job_file: str, machine: Machine, *flags: str) -> list[str]:
    return list(examine(load_config([job_file, *flags], REGISTRY), 2, machine=machine).errors)


@pytest.mark.parametrize("config", (QWEN3, MIXTURE), ids=("dense", "mixture"))
@pytest.mark.parametrize("head_dim", (16, 48, 128))
def test_head_sizes(write_model, job, config, head_dim):  # noqa: F811
    folder = write_model(config | {"head_dim": head_dim})
    found = findings_of(job, CPU)
    assert findings_of(job, GPU) == [] and findings_of(job, CPU, "--algorithm", "sft") == []
    if head_dim in (16, 48):
        (finding,) = found
        assert finding.startswith(
            f"--model ({folder}): its head_dim is {head_dim}, and vLLM's attention on a CPU has "
            "kernels for 32, 64, 80,"
        )
        assert findings_of(job, CPU, "--rollout-backend", "transformers") == []
        assert finding.endswith("Use another model, or a GPU, or try --rollout-backend transformers.")
    else:
        assert found == []


def test_the_list_is_the_installed_one():
    """Read from the source, and compared with what vLLM itself answers."""
    cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert cpu_head_sizes() == tuple(cpu_attn.CPUAttentionBackend.get_supported_head_sizes())


REAL_HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def test_latent_attention_on_a_gpu_needs_half_precision(write_model, job):  # noqa: F811
    folder = write_model(DEEPSEEK_V2 | REAL_HEADS)
    (finding,) = findings_of(job, GPU)
    assert finding == (
        f"--model ({folder}): it has latent attention, for which vLLM's attention on a GPU has no kernels in "
        "fp32. Add --bf16, or give --rollout-dtype bfloat16, or try --rollout-backend transformers."
    )
    for flags in (["--bf16"], ["--rollout-dtype", "bfloat16"], ["--rollout-backend", "transformers"]):
        assert findings_of(job, GPU, *flags) == []
    assert findings_of(job, CPU) == []


def test_latent_attention_on_a_gpu_has_few_head_sizes(write_model, job):  # noqa: F811
    folder = write_model(DEEPSEEK_V2)
    (finding,) = findings_of(job, GPU, "--bf16")
    assert finding.startswith(
        f"--model ({folder}): it has latent attention, for which vLLM's attention on a GPU has no kernels with "
        "qk_nope_head_dim, qk_rope_head_dim and v_head_dim of (12, 8, 10), only of (64, 64, 128), (128, 64, 128),"
    )
    assert findings_of(job, GPU, "--bf16", "--rollout-backend", "transformers") == []


def test_latent_attention_of_the_installed_vllm():
    """The CPU build cannot import the backends for CUDA, so their sources are read."""
    assert latent_head_sizes() == ((64, 64, 128), (128, 64, 128), (192, 64, 256), (256, 0, 256))
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    backends = vllm / "v1" / "attention" / "backends" / "mla"
    for name in (
        "cutlass_mla",
        "flashattn_mla",
        "flashinfer_mla",
        "flashmla",
        "tokenspeed_mla",
        "triton_mla",
    ):
        (dtypes,) = re.findall(r"supported_dtypes: .* = (\[[^\]]*\])", (backends / f"{name}.py").read_text())
        assert "bfloat16" in dtypes and "float32" not in dtypes, name


@pytest.mark.parametrize(
    "length, tp, backend, is_told", [(70, 2, "vllm", False), (71, 2, "vllm", True), (71, 1, "vllm", False)]
)
def test_a_folder_that_is_too_long_for_sockets_is_named(job, monkeypatch, length, tp, backend, is_told):  # noqa: F811
    folder = "/" + "x" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    found = [error for error in findings_of(job, CPU, *TWO_RANKS, str(tp)) if error.startswith("TMPDIR")]
    assert len(found) == is_told and all(f"TMPDIR ({folder}): " in error for error in found)


@pytest.mark.parametrize("backend, is_told", [("vllm", True), ("transformers", False)])
def test_shared_memory_that_cannot_be_written_is_named(job, monkeypatch, backend, is_told):  # noqa: F811
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/dev/shm" and access(path, mode))
    found = findings_of(job, CPU, "--rollout-backend", backend)
    assert [error.split(":")[0] for error in found] == ["/dev/shm"] * is_told
    assert findings_of(job, Machine(10**12, is_this=False), "--rollout-backend", backend) == []

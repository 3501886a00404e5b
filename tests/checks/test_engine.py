"""Models that vLLM's CPU build cannot run are refused on a CPU, by the list of the installed vLLM itself.

pytest tests/checks/test_engine.py"""

import pytest

from megarl.algorithms import REGISTRY
from megarl.checks.job import examine
from megarl.checks.machine import Machine
from megarl.config.installed import cpu_head_sizes
from megarl.config.loader import load_config
from tests.config.conftest import MIXTURE, QWEN3, job, write_model  # noqa: F401

CPU, GPU = Machine(10**12), Machine(None, has_gpu=True, gpu_bytes=8 * 10**10)


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

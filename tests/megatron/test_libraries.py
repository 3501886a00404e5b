"""Which libraries are taken for what: the wrong apex, and what needs a GPU.

pytest tests/megatron/test_libraries.py"""

from __future__ import annotations

import sys

import pytest
import torch

from megarl.config.hf_config import ModelShape
from megarl.config.installed import apex_error
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.megatron.libraries import libraries
from megarl.megatron.transformer_config import transformer_config
from tests.reshard.cuts import make_shape


@pytest.fixture
def apex(tmp_path, monkeypatch):
    """apex("optimizers") makes a package apex with that folder in it the one that Python finds."""

    def make(*folders: str) -> None:
        for folder in ("", *folders):
            (tmp_path / "apex" / folder).mkdir()
            (tmp_path / "apex" / folder / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.delitem(sys.modules, "apex", raising=False)
    return make


def test_an_apex_of_another_kind_is_told_by_name(apex):
    assert apex_error() is None  # none is installed
    apex()
    assert (
        "is not NVIDIA's, as it has no apex.optimizers" in apex_error()
        and "pip uninstall apex" in apex_error()
    )
    assert libraries()["apex"] == apex_error()


def test_nvidias_apex_passes(apex):
    apex("optimizers")
    assert apex_error() is None and libraries()["apex"] == "NVIDIA's"


def shape() -> ModelShape:
    return make_shape("qwen3", layers=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU does")
def test_without_a_gpu_there_is_no_fp8_and_nothing_is_fused():
    with pytest.raises(
        ValueError,
        match=r"^--fp8 \(hybrid\): needs an NVIDIA GPU and Transformer Engine, and this machine has no GPU.",
    ):
        transformer_config(shape(), ModelConfig(model="x", bf16=True), ParallelConfig(), {"fp8": "hybrid"})
    assert not transformer_config(
        shape(), ModelConfig(model="x"), ParallelConfig(), {}
    ).gradient_accumulation_fusion
    assert libraries() == {
        "transformer_engine": "none",
        "apex": "none",
        "adam": "torch AdamW",
        "gradient_accumulation_fusion": "off",
    }

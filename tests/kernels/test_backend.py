"""Which implementation runs, and that PyTorch's runs without Triton."""

import pytest
import torch

from megarl.kernels import backend as module
from megarl.kernels.backend import backend
from tests.launch import succeed


@pytest.mark.parametrize(
    "forced, expected", [(None, "torch"), ("", "torch"), ("torch", "torch"), ("interpret", "triton")]
)
def test_choice_for_a_cpu_tensor(monkeypatch, forced, expected):
    monkeypatch.setattr(module, "_interprets", lambda: True)
    monkeypatch.delenv("MEGARL_KERNELS", raising=False)
    if forced is not None:
        monkeypatch.setenv("MEGARL_KERNELS", forced)
    assert backend(torch.zeros(1)) == expected


def test_unknown_value(monkeypatch):
    monkeypatch.setenv("MEGARL_KERNELS", "cuda")
    with pytest.raises(
        ValueError, match=r"MEGARL_KERNELS \('cuda'\) must be one of torch, triton, interpret"
    ):
        backend(torch.zeros(1))


def test_triton_on_cpu_tensors_names_the_interpreter(monkeypatch):
    monkeypatch.setenv("MEGARL_KERNELS", "triton")
    with pytest.raises(ValueError, match="needs CUDA tensors, got one on cpu.*MEGARL_KERNELS=interpret"):
        backend(torch.zeros(1))


def test_triton_is_missing(monkeypatch):
    monkeypatch.setenv("MEGARL_KERNELS", "interpret")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install triton"):
        backend(torch.zeros(1))


def test_triton_that_compiles_cannot_interpret(monkeypatch):
    monkeypatch.setenv("MEGARL_KERNELS", "interpret")
    monkeypatch.setattr(module, "_interprets", lambda: False)
    with pytest.raises(RuntimeError, match="before it starts"):
        backend(torch.zeros(1))


CODE = """
import sys, torch
from megarl.kernels.fused_linear_policy_loss import fused_linear_policy_loss
from megarl.kernels.linear_log_probs import linear_log_probs
hidden, weight, targets = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3), torch.tensor([0, 1])
linear_log_probs(hidden, weight, targets, vocab_size=4)[0].sum().backward()
fused_linear_policy_loss(hidden, weight, targets, lambda l, e, r: (l.sum(), {}), vocab_size=4).loss.backward()
assert ("triton" in sys.modules) == (sys.argv[1] == "interpret"), sys.argv
"""


@pytest.mark.parametrize("forced", ["torch", "interpret"])
def test_only_triton_kernels_import_triton(monkeypatch, forced):
    monkeypatch.setenv("MEGARL_KERNELS", forced)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    succeed("-c", CODE, forced, timeout=120)

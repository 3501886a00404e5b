"""The `kernels` fixture: each test that takes it runs once with PyTorch and once with the Triton kernels in
Triton's interpreter.

Triton decides at its import whether it compiles or interprets (tests/conftest.py). With a GPU, interpreting
    needs a process of its own: MEGARL_KERNELS=interpret pytest tests/kernels
"""

import os

import pytest
import torch

WANTED = os.environ.get("MEGARL_KERNELS") == "interpret" or not torch.cuda.is_available()


@pytest.fixture(params=["torch", "interpret"])
def kernels(request, monkeypatch):
    """ "torch" or "interpret": what runs behind every door of megarl.kernels during the test."""
    if request.param == "interpret":
        if not WANTED:
            pytest.skip("with a GPU, MEGARL_KERNELS=interpret pytest tests/kernels does this")
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # kernel modules that the test is the first to import
        from tests.kernels.quick_interpreter import adapt_once

        monkeypatch.setattr("triton.runtime.interpreter._patch_lang", adapt_once)
    monkeypatch.setenv("MEGARL_KERNELS", request.param)
    return request.param

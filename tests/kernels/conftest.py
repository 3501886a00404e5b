"""The `kernels` fixture: each test that takes it runs once with PyTorch and once with the Triton kernels in
Triton's interpreter.

Triton decides at its import whether it compiles or interprets (tests/conftest.py). With a GPU, interpreting
    needs a process of its own: MEGARL_KERNELS=interpret pytest tests/kernels
"""

import os
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
import torch

WANTED = os.environ.get("MEGARL_KERNELS") == "interpret" or not torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that Triton's interpreter runs, and leave two of three to the nightly run where a test has five
    or more of them: the interpreter takes a hundred times what PyTorch does."""
    of_test = defaultdict(list)
    for item in items:
        how = getattr(item, "callspec", None)
        if Path(__file__).parent in item.path.parents and how and how.params.get("kernels") == "interpret":
            item.add_marker("interpreted")
            if not any(item.iter_markers("nightly")) and not any(item.iter_markers("nightly_but_one_in")):
                of_test[item.path, item.originalname].append(item)
    for cases in of_test.values():
        if len(cases) >= 5:
            cases.sort(key=lambda item: zlib.crc32(item.name.encode()))
            for item in cases[(len(cases) + 2) // 3 :]:
                item.add_marker("nightly")


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

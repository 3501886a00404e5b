"""Choose whether PyTorch or Triton computes an op.

    tensor on CUDA          triton
    tensor elsewhere        torch: PyTorch in chunks of rows, without a compiler
    MEGARL_KERNELS=torch    torch everywhere
    MEGARL_KERNELS=triton   triton; an error for a tensor that is not on CUDA
    MEGARL_KERNELS=interpret  the Triton kernels in Triton's interpreter: for tests of the kernels on a CPU,
    thousands of times slower

An op `<op>` has its specification, its PyTorch path and its one door in `<op>.py`, and its Triton kernels in
`<op>_triton.py`, which the door imports where it launches them: a machine that never runs a kernel never
imports Triton.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Literal

from torch import Tensor

_CHOICES = ("torch", "triton", "interpret")


def _forced() -> str | None:
    value = os.environ.get("MEGARL_KERNELS") or None
    if value is not None and value not in _CHOICES:
        raise ValueError(
            f"MEGARL_KERNELS ({value!r}) must be one of {', '.join(_CHOICES)}. Leave it out to "
            "choose by device."
        )
    return value


if _forced() == "interpret":
    # Triton decides at import, and once for all its kernels, whether they are compiled or interpreted.
    os.environ["TRITON_INTERPRET"] = "1"


def backend(tensor: Tensor) -> Literal["torch", "triton"]:
    """Return the name of the implementation that runs an op on `tensor`.

    Raises: ValueError for an unknown MEGARL_KERNELS, or one that this tensor cannot run with; ImportError
    without Triton where it is needed; RuntimeError if Triton was imported to compile and is now asked to
    interpret.
    """
    forced = _forced()
    if forced == "torch" or (forced is None and not tensor.is_cuda):
        return "torch"
    if forced == "triton" and not tensor.is_cuda:
        raise ValueError(
            f"MEGARL_KERNELS=triton needs CUDA tensors, got one on {tensor.device}. "
            "Use MEGARL_KERNELS=interpret to run the Triton kernels on a CPU."
        )
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            "the Triton kernels need the package triton: pip install triton, or "
            "MEGARL_KERNELS=torch to do without"
        )
    if forced == "interpret" and not _interprets():
        raise RuntimeError(
            "Triton was imported as a compiler in this process: set MEGARL_KERNELS=interpret before it starts"
        )
    return "triton"


def _interprets() -> bool:
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    import triton.language

    return type(triton.language.max).__name__ == "InterpretedFunction"

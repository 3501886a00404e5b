"""The sources of csrc/ with its CUDA kernels, as a C++ compiler without CUDA takes them."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
HEADERS = (f"-I{HERE}", f"-I{CSRC}")
"""Options of the compiler."""


def host_sources(folder: Path) -> list[Path]:
    """Write the kernels' files into `folder` with launches as function calls. Return all files but bind.cpp."""
    kernels = []
    for file in ("copy_plan.cu", "digest.cu"):
        text, launches = re.subn(
            r"(\w+)<<<(.*)>>>\((.*?)\);", r"launch(\2, [&] { \1(\3); });", (CSRC / file).read_text()
        )
        assert launches, f"{file} launches no kernel"
        kernels.append(folder / f"{file}.cpp")
        kernels[-1].write_text(text)
    return kernels + [CSRC / f"{name}.cpp" for name in ("copy_plan", "convert", "digest")]

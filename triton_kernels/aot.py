"""Specialised kernels that the ahead-of-time check compiles: each `<op>_triton.py` lists its own in
`AOT_CASES: list[AotCase]`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AotCase:
    """One specialisation of one kernel, as it is launched on a GPU."""

    kernel: Any
    """The @triton.jit function."""
    signature: Mapping[str, str]
    """Triton type of every argument that is not a constexpr, e.g. {"logits": "*bf16", "num_columns": "i32",
    "temperature": "fp32"}."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Value of every constexpr argument; also of a pointer that is passed as None."""
    aligned: tuple[str, ...] = ()
    """Arguments divisible by 16: pointers that PyTorch allocated, sizes and strides that usually are."""
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = (80, 90, 100)
    """Compute capabilities, 90 for sm_90, that this case is launched on."""
    must_use: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Capability -> instructions that its PTX must have, e.g. {90: ("wgmma.mma_async",), 100:
    ("tcgen05.mma",)}."""


def aot_case(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    aligned: tuple[str, ...] = (),
    **launch,
) -> AotCase:
    """Return the case of a kernel as our launchers call it.

    Args:
        constants: as for `AotCase`.
        types: Triton types of arguments. All others are fp32 pointers.
        aligned: arguments divisible by 16, in addition to pointers and strides."""
    names = [name for name in inspect.signature(kernel.fn).parameters if name not in constants]
    signature = {name: types.get(name, "*fp32") for name in names}
    usual = [name for name, kind in signature.items() if kind.startswith("*") or name.endswith("stride")]
    return AotCase(
        kernel=kernel, signature=signature, constants=constants, aligned=(*usual, *aligned), **launch
    )

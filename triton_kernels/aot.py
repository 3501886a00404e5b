"""Specialised kernels that the ahead-of-time check compiles: each `<op>_triton.py` lists its own in
`AOT_CASES: list[AotCase]`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NUM_TOKENS, NUM_HIDDEN, VOCAB_SIZE = 32_768, 4_096, 152_064
"""The shape that the kernels are checked and their table is computed at. 32k x 152k logits are more than
2**31."""

NUM_SAMPLES = 4_096
"""Samples that group advantages are computed of, at that shape."""

ARGUMENTS = {
    "num_rows": NUM_TOKENS,
    "num_tokens": NUM_TOKENS,
    "num_columns": VOCAB_SIZE,
    "num_real": VOCAB_SIZE,
    "num_hidden": NUM_HIDDEN,
    "row_stride": VOCAB_SIZE,
    "out_stride": VOCAB_SIZE,
    "hidden_stride": NUM_HIDDEN,
    "weight_stride": NUM_HIDDEN,
    "num_samples": NUM_SAMPLES,
    "num_pairs": NUM_TOKENS,
    "num_blocks": NUM_TOKENS,
}
"""Largest value of each integer argument of our kernels at that shape, by name."""

Element = Literal["token", "logit", "hidden value", "partial sum", "pair of samples"]


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
    variant: str = ""
    """What distinguishes this case from others of the kernel, for people; its constants if empty."""
    element: Element = "token"
    """What the kernel's cost is counted by."""
    num_elements: int | None = None
    """Elements that one pass through the kernel's code computes, each loop over elements entered once. None:
    the constant BLOCK."""
    bytes_per_element: float | None = None
    """Bytes of GPU memory per element where operands come from a cache again. None: all loads and stores."""


def aot_case(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    aligned: tuple[str, ...] = (),
    **launch,
) -> AotCase:
    """Return the `AotCase` of a kernel with the argument types and alignments that the launchers use.

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

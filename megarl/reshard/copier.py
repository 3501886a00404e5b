"""Run many strided copies as one, which executes a reshard plan.

A pair (dst, src) of tensor views is one rectangle. Rectangles are checked once, handed to megarl._C as
addresses, and copied by every `run`: threads and memcpy on a CPU, one kernel launch on a GPU, fp32, bf16 and
fp16 converted on the way. Without the extension PyTorch does the same on one thread; its result is the
specification."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Modes of csrc/rect.h: a copy is named by its element size, a conversion by two digits.
FLOATS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
COPY_SIZES = (1, 2, 4, 8)


class CopyPlan:
    """Copies that are repeated between the same addresses.

    Args:
        dst: views [rows, cols] or [n], row-major (last stride 1), on one device. They must not
            overlap: the caller's plan proves it.
        src: as many tensor views with the same shapes, on the same kind of device; the same dtype, or both
            one of fp32, bf16, fp16.
        num_threads: CPU threads of one run. Ignored on a GPU.
    Raises: ValueError naming the first pair that breaks a rule.

    The plan holds the views, so their memory stays. It writes below autograd.
    """

    def __init__(self, dst: Sequence[Tensor], src: Sequence[Tensor], num_threads: int = 1):
        if num_threads < 1:
            raise ValueError(f"num_threads ({num_threads}) must be >= 1. Try 1.")
        self._dst, self._src, self._num_threads = list(dst), list(src), num_threads
        rects = _rects(self._dst, self._src)
        self._addresses = _addresses(self._dst, self._src)
        self._device = self._dst[0].device if self._dst else torch.device("cpu")
        self.bytes: int = sum(view.numel() * view.element_size() for view in self._dst)
        """Bytes that one run writes."""
        self._plan = self._tables = None
        if extension := extension_for(self._device.type):
            self._plan = extension.CopyPlan(torch.tensor(rects, dtype=torch.int64).view(-1, 7))
        if self._plan is not None and self._device.type == "cuda":
            tables = (
                torch.empty(self._plan.num_rects, 8, dtype=torch.int64),
                torch.empty(self._plan.num_tiles, dtype=torch.int32),
            )
            self._plan.fill_tables(*tables)
            self._tables = [table.to(self._device) for table in tables]

    def run(self) -> None:
        """Copy every rectangle. On a GPU this is a launch on the current stream of the destination's
        device.

        Raises: RuntimeError if a view's storage moved since the plan was built.
        """
        if _addresses(self._dst, self._src) != self._addresses:
            raise RuntimeError(
                "a view's storage moved after this CopyPlan was built, so its addresses are stale. "
                "Build a new plan."
            )
        if self._plan is None:
            _copy_with_pytorch(self._dst, self._src)
        elif self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._plan.run_cuda(
                    *(table.data_ptr() for table in self._tables), torch.cuda.current_stream().cuda_stream
                )
        else:
            self._plan.run(self._num_threads)


def copy_rects(dst: Sequence[Tensor], src: Sequence[Tensor], num_threads: int = 1) -> None:
    """Copy each src view into the dst view at its index, once; arguments and errors as for `CopyPlan`."""
    CopyPlan(dst, src, num_threads).run()


def _rects(dst: list[Tensor], src: list[Tensor]) -> list[tuple[int, ...]]:
    """Return one (src, dst, rows, cols, src_ld, dst_ld, mode) per pair: addresses in bytes, the rest in
    elements."""
    if len(dst) != len(src):
        raise ValueError(f"dst ({len(dst)} views) and src ({len(src)} views) must pair up.")
    rects = []
    for index, (to, of) in enumerate(zip(dst, src, strict=True)):
        if to.shape != of.shape:
            raise ValueError(
                f"pair {index}: dst shape {list(to.shape)} must equal src shape {list(of.shape)}."
            )
        if (
            to.device != dst[0].device
            or of.device.type != to.device.type
            or to.device.type not in ("cpu", "cuda")
        ):
            raise ValueError(
                f"pair {index}: dst ({to.device}) must be where the first dst is ({dst[0].device}), "
                f"and src ({of.device}) on the same kind of device, cpu or cuda."
            )
        where = f"pair {index}"
        src_ld, dst_ld = leading_dimension(of, f"{where}: src"), leading_dimension(to, f"{where}: dst")
        mode = conversion(of.dtype, to.dtype, where)
        rects.append((of.data_ptr(), to.data_ptr(), *two_dimensions(to, where), src_ld, dst_ld, mode))
    return rects


def two_dimensions(view: Tensor, where: str) -> tuple[int, int]:
    """Return (rows, cols); a vector is one row. Raises: ValueError, starting with `where`, for other
    shapes."""
    if view.dim() not in (1, 2):
        raise ValueError(
            f"{where}: a view must have 1 or 2 dimensions, not shape {list(view.shape)}. Try view.flatten(1)."
        )
    return (1, *view.shape)[-2:]


def leading_dimension(view: Tensor, where: str) -> int:
    """Return the number of elements from one row to the next. Raises: ValueError, starting with `where`, if
    rows are not contiguous or overlap."""
    cols = view.shape[-1]
    if view.numel() == 0:
        return cols
    if cols > 1 and view.stride(-1) != 1:
        raise ValueError(
            f"{where} strides {list(view.stride())} must end in 1 (row-major). Try view.contiguous()."
        )
    if view.dim() == 1 or view.shape[0] == 1:
        return cols
    if view.stride(0) < cols:
        raise ValueError(
            f"{where} strides {list(view.stride())} make rows of {cols} elements overlap. Try "
            "view.contiguous()."
        )
    return view.stride(0)


def conversion(src: torch.dtype, dst: torch.dtype, where: str) -> int:
    """Return the extension's name for the conversion of elements from one dtype to another. Raises:
    ValueError, starting with `where`, if it has none."""
    if src == dst and src.itemsize in COPY_SIZES:
        return src.itemsize
    if src in FLOATS and dst in FLOATS:
        return 10 * FLOATS[src] + FLOATS[dst]
    raise ValueError(
        f"{where}: {src} to {dst} is neither a copy of 1, 2, 4 or 8 bytes nor between float32, "
        "bfloat16 and float16."
    )


def _addresses(dst: list[Tensor], src: list[Tensor]) -> list[int]:
    return [view.data_ptr() for view in dst] + [view.data_ptr() for view in src]


@torch.no_grad()
def _copy_with_pytorch(dst: list[Tensor], src: list[Tensor]) -> None:
    if dst:  # PyTorch refuses empty lists
        torch._foreach_copy_(dst, src)


@functools.cache
def extension_for(device_type: str) -> ModuleType | None:
    """Return the extension megarl._C, or None if it cannot copy on such a device. Cached, so that a missing
    one is reported once."""
    try:
        from megarl import _C
    except ImportError as error:
        logger.warning(
            "megarl._C is not there (%s): PyTorch copies the weights instead. Reinstall with a C++ compiler.",
            error,
        )
        return None
    if device_type == "cuda" and not _C.built_with_cuda:
        logger.warning(
            "megarl._C is built %s. PyTorch copies GPU weights instead. Reinstall with MEGARL_CUDA=ON.",
            _C.build_info,
        )
        return None
    return _C

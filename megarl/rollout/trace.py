"""Find out, from vLLM's own `load_weights`, which part of which checkpoint tensor each parameter holds (the
atlas).

An atlas is the sharding spec of one rank. Empty tensors with the checkpoint's names and sizes go through the
loader. They have no data, but each view of one knows where in its tensor it lies. The same holds for each
view of a parameter. Every `copy_` between the two is a piece of the atlas, every `fill_` is padding. The
tables of megarl/reshard/vllm_atlas.py are faster and need no model. This trace serves architectures without a
table."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from megarl.reshard.atlas import Atlas, LocalParam, Piece, Sizes


def empty_model(vllm_config: VllmConfig) -> torch.nn.Module:
    """Return this rank's model with parameters that take no memory, before any weight is loaded or packed.

    The process must have vLLM's parallel groups."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    # attention layers register themselves by name, once
    config.compilation_config.static_forward_context = {}
    rotary = dict(_ROPE_DICT)  # vLLM shares rotary embeddings between models, and the new ones are empty
    try:
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
            torch.device("meta"),
        ):
            return initialize_model(config)
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(rotary)


@torch.no_grad()
def trace_vllm_atlas(model: torch.nn.Module, sizes: Sizes) -> Atlas:
    """Return which part of which checkpoint tensor each parameter holds, for a model without loaded weights.

    The model comes from `empty_model` or is a real one; nothing is written.

    Args:
        sizes: checkpoint tensor -> (rows, cols); (n, 1) is a vector.
    Raises: ValueError naming a parameter that the loader fills with anything but a rectangle of a checkpoint
    tensor."""
    parameters = dict(model.named_parameters())
    loaded = {
        name: torch.empty(
            size[:1] if size[1] == 1 else size, device="meta", dtype=next(iter(parameters.values())).dtype
        )
        for name, size in sizes.items()
    }
    recorder = _Recorder(_by_storage(parameters), _by_storage(loaded))
    with recorder:
        model.load_weights(iter(loaded.items()))
    return {name: _local_param(name, parameter, recorder) for name, parameter in parameters.items()}


def _by_storage(tensors: dict[str, Tensor]) -> dict[int, tuple[str, Tensor]]:
    return {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class _View:
    """A view of a tensor that is [rows, cols], with all leading dimensions folded into rows.

    Example: rows 8 to 12 of a [64, 32] matrix: offset 256, sizes (4, 32), strides (32, 1)."""

    name: str
    cols: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, view: Tensor, name: str, base: Tensor) -> _View:
        if not base.is_contiguous():
            raise ValueError(f"{name}: its memory is not contiguous, so its rows cannot be traced.")
        return cls(
            name,
            base.shape[-1] if base.dim() > 1 else 1,
            view.storage_offset(),
            tuple(view.shape),
            view.stride(),
        )

    def outline(self) -> list[tuple[int, int, bool]]:
        """Return (dimension, size, whether it runs along a row) of each dimension, in the order of strides.

        Views of equal outline hold their elements in the same order."""
        dims = [(size, stride) for size, stride in zip(self.sizes, self.strides, strict=True) if size > 1]
        order = sorted(range(len(dims)), key=lambda dim: dims[dim][1])
        return [(dim, dims[dim][0], dims[dim][1] == 1 < self.cols) for dim in order]

    def rectangle(self) -> tuple[int, int, int, int]:
        """Return [row_start, row_end, col_start, col_end]. Raises: ValueError if the view is no rectangle."""
        (row, col), rows, cols = divmod(self.offset, self.cols), 1, 1
        # From the innermost dimension on: first along columns, then whole rows further down.
        for size, stride in sorted(zip(self.sizes, self.strides, strict=True), key=lambda dim: dim[1]):
            if size == 1:
                continue
            if stride == 1 and cols == rows == 1 and self.cols > 1:
                cols = size
            elif stride == rows * self.cols:
                rows *= size
            else:
                raise ValueError(
                    f"{self.name}: sizes {self.sizes} with strides {self.strides} are no rectangle "
                    "of its rows."
                )
        if col + cols > self.cols:
            raise ValueError(
                f"{self.name}: {cols} elements from column {col} on cross the end of a row of {self.cols}."
            )
        return row, row + rows, col, col + cols


class _Recorder(TorchDispatchMode):
    """Records which checkpoint views are copied into which parameter views, and fills. Writes nothing into
    parameters."""

    def __init__(
        self, parameters: dict[int, tuple[str, Tensor]], loaded: dict[int, tuple[str, Tensor]]
    ) -> None:
        super().__init__()
        self.parameters, self.loaded = parameters, loaded
        self.pieces: dict[str, list[Piece]] = {}
        self.fills: dict[str, list[tuple[int, int, int, int]]] = {}
        self.unknown: dict[str, str] = {}
        """Parameter -> the operation that wrote the parameter from something other than the checkpoint."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        target = (
            self._find(self.parameters, arguments[0]) if arguments and function._schema.is_mutable else None
        )
        if target is None:
            return function(*arguments, **(keywords or {}))
        if 0 in target.sizes:
            return arguments[0]
        source = self._find(self.loaded, arguments[1]) if function is torch.ops.aten.copy_.default else None
        if source is not None and source.outline() == target.outline():
            from_row, to_row, from_col, to_col = source.rectangle()
            row, _, col, _ = target.rectangle()
            self.pieces.setdefault(target.name, []).append(
                Piece(source.name, from_row, to_row, from_col, to_col, row, col)
            )
        elif function in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self.fills.setdefault(target.name, []).append(target.rectangle())
        else:
            self.unknown[target.name] = str(function)
        return arguments[0]

    @staticmethod
    def _find(known: dict[int, tuple[str, Tensor]], tensor: object) -> _View | None:
        found = known.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None
        return None if found is None else _View.of(tensor, *found)


def _local_param(name: str, parameter: Tensor, recorder: _Recorder) -> LocalParam:
    if name in recorder.unknown:
        operation = recorder.unknown[name]
        raise ValueError(
            f"{name}: its loader computes with the checkpoint's tensors ({operation}), so no copy "
            "can replace it."
        )
    cols = parameter.shape[-1] if parameter.dim() > 1 else 1
    rows, pieces = parameter.numel() // cols, recorder.pieces.get(name, [])
    filled = max((piece.local_row + piece.row_end - piece.row_start for piece in pieces), default=0)
    padded = any(
        (start, end, first, last) == (filled, rows, 0, cols)
        for start, end, first, last in recorder.fills.get(name, [])
    )
    return LocalParam(rows, cols, tuple(pieces), padding_rows=rows - filled if padded else 0)

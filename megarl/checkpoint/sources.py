"""Read weights of a megarl checkpoint, a Megatron checkpoint or a Hugging Face folder under their Hugging
Face names, a few rows at a time and without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megarl.checkpoint.load import Checkpoint
from megarl.checkpoint.manifest import WEIGHTS, CheckpointError, check_tensors
from megarl.checkpoint.rectangles import Box, matrix_size
from megarl.checkpoint.tensor_file import TensorFile
from megarl.checkpoint.torch_dist import MegatronWeights, megatron_folder
from megarl.config.hf_config import ModelShape, function_fields
from megarl.files.checkpoints import MANIFEST
from megarl.reshard.atlas import hf_sizes
from megarl.reshard.hf_folder import names_left_out, read_folder
from megarl.reshard.hf_weights import note_prediction_tensors


class WeightSource(Protocol):
    """Weights on disk in one of these formats, read by their Hugging Face names.

    Attributes:
        tensors: canonical name -> (dtype, shape).
        dtype: of the model that was trained, None if that is what is stored."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    dtype: torch.dtype | None

    def read(self, name: str, row_start: int, row_end: int) -> Tensor:
        """Return rows of a tensor, [row_end - row_start, cols]; a vector is [n, 1]."""

    def check(self) -> None:
        """Check the files. Raises: CheckpointError naming a file that is damaged, as far as the format can
        tell."""


class HFWeights:
    """The *.safetensors of a Hugging Face folder. Buffers that old folders carry, and the copy of a tied
    model's embeddings, are left out."""

    dtype = None

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        stored = read_folder(folder, is_whole=True)
        note_prediction_tensors(folder, stored, shape)
        left_out = names_left_out(stored, shape)
        files = {path: TensorFile(path) for path in {tensor.path for tensor in stored.values()}}
        self._file_of = {name: files[tensor.path] for name, tensor in stored.items() if name not in left_out}
        self.tensors = {name: (file.dtype(name), file.shape(name)) for name, file in self._file_of.items()}

    def read(self, name: str, row_start: int, row_end: int) -> Tensor:
        return self._file_of[name].read(name, row_start, row_end)

    def check(self) -> None:
        pass  # a file that is cut short was found by its header


class CheckpointWeights:
    """The weights of a megarl checkpoint, as a `WeightSource`."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint(folder)
        self.tensors = {
            name: (stored.dtype, stored.shape) for name, stored in self.checkpoint.tensors(WEIGHTS).items()
        }
        name = self.checkpoint.state.get("dtype")
        self.dtype = getattr(torch, name) if isinstance(name, str) else None

    def read(self, name: str, row_start: int, row_end: int) -> Tensor:
        return self.checkpoint.read(
            WEIGHTS, name, Box(row_start, row_end, 0, matrix_size(self.tensors[name][1])[1])
        )

    def check(self) -> None:
        self.checkpoint.manifest.check_digests(self.checkpoint.folder, self.checkpoint.files([WEIGHTS]))


def open_weights(folder: Path, shape: ModelShape) -> WeightSource:
    """Open the weights of a megarl checkpoint, a sharded checkpoint of Megatron, or a Hugging Face folder of
    this model.

    Raises: CheckpointError if the folder is none of these, or its tensors are not the model's."""
    if (folder / MANIFEST).exists():
        source: WeightSource = CheckpointWeights(folder)
    elif (megatron := megatron_folder(folder)) is not None:
        source = MegatronWeights(megatron, shape)
    elif any(folder.glob("*.safetensors")):
        source = HFWeights(folder, shape)
    else:
        raise CheckpointError(
            f"{folder} holds no weights that can be read: neither {MANIFEST} (a megarl checkpoint), "
            "nor .metadata (Megatron's "
            "--ckpt-format torch_dist), nor *.safetensors (Hugging Face)."
        )
    check_tensors(
        f"the weights in {folder}",
        {name: matrix_size(shape) for name, (_, shape) in source.tensors.items()},
        hf_sizes(shape),
    )
    if isinstance(source, CheckpointWeights):
        source.checkpoint.check_model(function_fields(shape))
    return source

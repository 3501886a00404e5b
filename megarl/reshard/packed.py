"""View matrices in vLLM's CPU layout of expert weights.

The layout has blocks of 16 rows, and within a block one column after the other. Element (n, k) of a matrix
[N, K] is element ((n // 16) * K + k) * 16 + n % 16 of its storage. N is a multiple of 16. Elements have at
most 4 bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16


@dataclass(frozen=True)
class PackedView:
    """Rows [row, row + rows) and columns [col, col + cols) of a packed matrix.

    The view has the methods of a tensor that the copier and the digest use.

    Raises: ValueError if the storage is not a whole packed matrix of `matrix_cols` columns, or if the
    rectangle exceeds it."""

    storage: Tensor
    """Contiguous CPU tensor of any shape.

    The tensor starts at a multiple of 16 elements, as every allocation of PyTorch (64 bytes) does."""
    matrix_cols: int
    """Number of columns K. A stack of expert matrices [E, N, K] is one matrix of E * N rows."""
    row: int
    col: int
    rows: int
    cols: int

    def __post_init__(self) -> None:
        if self.storage.device.type != "cpu":
            raise ValueError(
                f"storage ({self.storage.device}) must be on a CPU: vLLM packs nothing elsewhere."
            )
        if self.element_size() > 4:
            raise ValueError(
                f"storage ({self.dtype}) must have elements of at most 4 bytes. Try torch.float32."
            )
        size, block_size = self.storage.numel(), BLOCK * self.matrix_cols
        if (
            not self.storage.is_contiguous()
            or size % block_size
            or self.storage.data_ptr() % (BLOCK * self.element_size())
        ):
            raise ValueError(
                f"storage (shape {list(self.storage.shape)}, strides {list(self.storage.stride())}) "
                "must be contiguous, hold a "
                f"multiple of {BLOCK} x matrix_cols ({self.matrix_cols}) elements and start at a "
                f"multiple of {BLOCK}."
            )
        if (
            min(self.row, self.col, self.rows, self.cols) < 0
            or self.col + self.cols > self.matrix_cols
            or self.row + self.rows > size // self.matrix_cols
        ):
            raise ValueError(
                f"rows [{self.row}:{self.row + self.rows}], columns "
                f"[{self.col}:{self.col + self.cols}] must lie in the packed "
                f"matrix of {size // self.matrix_cols} x {self.matrix_cols}."
            )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, self.cols))

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def dim(self) -> int:
        return 2

    def numel(self) -> int:
        return self.rows * self.cols

    def element_size(self) -> int:
        return self.storage.element_size()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.storage.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of element (row, col).

        The matrix is aligned, so the address also gives row % 16."""
        offset = ((self.row // BLOCK) * self.matrix_cols + self.col) * BLOCK + self.row % BLOCK
        return self.storage.data_ptr() + offset * self.element_size()

    def read(self) -> Tensor:
        """Return a copy of the values, [rows, cols]."""
        return self._blocks()[self._index()]

    def write(self, values: Tensor) -> None:
        """Store values [rows, cols], converted to the matrix's dtype."""
        self._blocks()[self._index()] = values.to(self.dtype)

    def _blocks(self) -> Tensor:
        return self.storage.detach().view(-1, self.matrix_cols, BLOCK)

    def _index(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, cols = (
            torch.arange(self.row, self.row + self.rows)[:, None],
            torch.arange(self.col, self.col + self.cols),
        )
        return rows // BLOCK, cols, rows % BLOCK

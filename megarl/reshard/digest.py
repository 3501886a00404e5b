"""64-bit digests of weights by value, to compare the two ends of a transfer without moving the weights.

A source rectangle and the destination that it was copied to have the same digest, whatever their strides;
where the copy converts, the source is digested as what it becomes. The numbers do not depend on threads,
device, or whether the extension is there: csrc/digest.h defines them. Not cryptographic: it finds what goes
wrong, not what somebody hides.

    sent = Digest(source_views, [view.dtype for view in destination_views]).sampled(version)
    received = Digest(destination_views).sampled(version)
    assert sent == received"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.reshard.copier import conversion, extension_for, leading_dimension, two_dimensions

SAMPLES = 16
_MASK = 2**64 - 1
_WEYL, _MULTIPLIERS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_TILE_WORDS = 4096  # of csrc/digest.h
_PIECE_WORDS = 1 << 20  # without the extension: 8 MB of words at a time


class Digest:
    """Computes digests of the same tensor views again for every version of the weights.

    Args:
        views: [rows, cols] or [n], row-major. A vector is one row: [n], [1, n] and [n, 1] are the
            same values, but the last has another digest. Kept; read at every call.
        dtypes: what each view's values become at their destination, one for all or one per view. Default:
            what they are.
        num_threads: CPU threads.
    Raises: ValueError naming the first view that breaks a rule.

    Every method returns one number in [0, 2**64) per view, in order. Neither is collective."""

    def __init__(
        self,
        views: Sequence[Tensor],
        dtypes: Sequence[torch.dtype] | torch.dtype | None = None,
        num_threads: int = 1,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads ({num_threads}) must be >= 1. Try 1.")
        if dtypes is None or isinstance(dtypes, torch.dtype):
            dtypes = [dtypes or view.dtype for view in views]
        if len(dtypes) != len(views):
            raise ValueError(
                f"dtypes ({len(dtypes)}) must be one per view ({len(views)}), one torch.dtype for "
                "all, or left out."
            )
        self._views, self._dtypes, self._num_threads = list(views), list(dtypes), num_threads
        rows = [self._describe(index) for index in range(len(self._views))]
        self._table = torch.tensor(rows, dtype=torch.int64).view(-1, 5)
        storages = [view.untyped_storage() for view in self._views]
        self._storages = list({storage._cdata: storage for storage in storages}.values())
        self._addresses = [storage.data_ptr() for storage in self._storages]
        self._device = self._views[0].device if self._views else torch.device("cpu")
        if any(view.device != self._device for view in self._views):
            raise ValueError(
                f"views must be on one device, not on {sorted({str(view.device) for view in self._views})}."
            )
        self._extension = extension_for(self._device.type)

    def sampled(self, version: int) -> list[int]:
        """Return digests of 16 words of 8 bytes per view (all, if it has no more), one drawn by `version`
        from each 16th of the view.

        It finds every wrong stretch of an eighth of a view or more, and a smaller share f with probability 1
        - (1 - f)^16. Digests of different versions differ, so an old one is never taken for a new one."""
        return self._compute(_mix(version & _MASK), sampled=True)

    def full(self) -> list[int]:
        """Return digests of all values, at the speed of memory."""
        return self._compute(0, sampled=False)

    def _describe(self, index: int) -> tuple[int, ...]:
        """Return the extension's row for a view: address, rows, cols, ld, mode."""
        view, where = self._views[index], f"view {index}"
        mode = conversion(view.dtype, self._dtypes[index], where)
        return (view.data_ptr(), *two_dimensions(view, where), leading_dimension(view, where), mode)

    def _compute(self, seed: int, sampled: bool) -> list[int]:
        if self._extension is None:
            return [
                _digest(view, dtype, seed, sampled)
                for view, dtype in zip(self._views, self._dtypes, strict=True)
            ]
        table, addresses = self._table, [storage.data_ptr() for storage in self._storages]
        if addresses != self._addresses:
            self._addresses = addresses
            table[:, 0] = torch.tensor([view.data_ptr() for view in self._views], dtype=torch.int64)
        if self._device.type == "cuda":
            digests = self._sum_on_gpu(seed, sampled)
            self._extension.finish_digests(table, digests, seed)
        else:
            digests = torch.empty(len(table), dtype=torch.int64)
            self._extension.digest(table, digests, seed, sampled, self._num_threads)
        return digests.view(torch.uint64).tolist()

    def _sum_on_gpu(self, seed: int, sampled: bool) -> Tensor:
        """Return sums over the words of each view, int64 [N] on the CPU. Waits for the current stream."""
        sizes = torch.tensor([dtype.itemsize for dtype in self._dtypes])
        words = self._table[:, 1] * ((self._table[:, 2] * sizes + 7) // 8)
        tiles = (words + _TILE_WORDS - 1) // _TILE_WORDS
        with torch.cuda.device(self._device):
            tiled = torch.cat([self._table, (tiles.cumsum(0) - tiles)[:, None]], dim=1).to(self._device)
            view_of_tile = (
                torch.arange(len(tiles), dtype=torch.int32).repeat_interleave(tiles).to(self._device)
            )
            sums = torch.zeros(len(tiles), dtype=torch.int64, device=self._device)
            self._extension.sum_cuda(
                tiled.data_ptr(),
                view_of_tile.data_ptr(),
                len(tiles),
                len(view_of_tile),
                seed,
                sampled,
                sums.data_ptr(),
                torch.cuda.current_stream().cuda_stream,
            )
            return sums.cpu()


# ------------------------------------------------------------------ the same in PyTorch; int64 arithmetic is
# modulo 2**64


@torch.no_grad()
def _digest(view: Tensor, dtype: torch.dtype, seed: int, sampled: bool) -> int:
    rows, cols = two_dimensions(view, "view")
    per_word = 8 // dtype.itemsize
    words_per_row = -(-cols // per_word)
    num_words, total = rows * words_per_row, 0
    if sampled and num_words > SAMPLES:
        pieces = [_sampled_words(num_words, seed)]
    else:
        pieces = [
            torch.arange(first, min(first + _PIECE_WORDS, num_words))
            for first in range(0, num_words, _PIECE_WORDS)
        ]
    for words in pieces:
        indices = words.to(view.device)
        values = _read_words(view, dtype, indices // words_per_row, indices % words_per_row * per_word)
        total += int(_terms(values, indices, seed).sum())
    return _mix(total + rows * _MULTIPLIERS[0] + cols * _MULTIPLIERS[1] + dtype.itemsize + seed)


def _sampled_words(num_words: int, seed: int) -> Tensor:
    """Return the indices of one word in each of SAMPLES ranges that cover the view."""
    words = []
    for sample in range(SAMPLES):
        first, last = num_words * sample // SAMPLES, num_words * (sample + 1) // SAMPLES
        words.append(first + (_mix(seed + sample * _WEYL) >> 1) % (last - first))
    return torch.tensor(words)


def _read_words(view: Tensor, dtype: torch.dtype, row: Tensor, col: Tensor) -> Tensor:
    """Return int64 [n]: the elements of each row from `col` on that fill 8 bytes, in the destination's
    dtype; zeros past the row's end."""
    matrix = view.detach().view(two_dimensions(view, "view"))
    cols = col[:, None] + torch.arange(8 // dtype.itemsize, device=col.device)
    elements = matrix[row[:, None], cols.clamp(max=matrix.shape[1] - 1)].to(dtype)
    return elements.masked_fill(cols >= matrix.shape[1], 0).contiguous().view(torch.int64).flatten()


def _terms(words: Tensor, indices: Tensor, seed: int) -> Tensor:
    mixed = words ^ ((indices + 1) * _signed(_WEYL) + _signed(seed))
    return (mixed & 0xFFFFFFFF) * ((mixed >> 32) & 0xFFFFFFFF) + words


def _mix(x: int) -> int:
    """Return x with its bits mixed by the finalizer of SplitMix64."""
    x &= _MASK
    x = (x ^ (x >> 30)) * _MULTIPLIERS[0] & _MASK
    x = (x ^ (x >> 27)) * _MULTIPLIERS[1] & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - 2**64 if x >> 63 else x

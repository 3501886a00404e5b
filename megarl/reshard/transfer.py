"""Execute a reshard plan: within a rank by copies, between ranks by messages.

Weights travel over torch.distributed in chunks, in the dtype of their destination. A large rectangle without
gaps is sent from where it is and received where it belongs. Columns of a matrix and small rectangles go
through a staging buffer of bounded size. Within a rank everything is copied in place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.reshard.copier import CopyPlan
from megarl.reshard.plan import RectCopy, ReshardPlan

_ALIGNMENT = 16  # bytes


class Transfer:
    """The sends, receives and local copies of one rank in a plan; built once, run for every new version of
    the weights.

    Args:
        plan: from `make_plan` over atlases of *global* ranks; the same on every rank.
        rank: this process.
        src_tensors, dst_tensors: local parameters by the names of the atlases, each a [rows, cols] view of
            the live weight (vectors [n, 1]). What this rank does not send or receive may be absent.
        dtypes: dtype of each destination tensor that this rank sends to, by name.
    Raises: ValueError naming a tensor that is missing or has another shape than the plan needs.

    Running is collective over `plan.ranks`. Views and buffers are kept; where a storage has moved in memory,
    with all its views, call `follow`."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        src_tensors: dict[str, Tensor],
        dst_tensors: dict[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        limit = _chunk_bytes(plan)
        self._sends: dict[int, list[_Chunk]] = {}
        self._receives: dict[int, list[_Chunk]] = {}
        self._here: list[tuple[Tensor, Tensor]] = []
        for (src, dst), copies in plan.copies.items():
            sources = [src_view(copy, src_tensors) for copy in copies] if src == rank else []
            destinations = [dst_view(copy, dst_tensors) for copy in copies] if dst == rank else []
            if src == dst == rank:
                self._here = list(zip(sources, destinations, strict=True))
            elif src == rank:
                self._sends[dst] = _chunks(sources, [dtypes[copy.dst_name] for copy in copies], limit)
            elif dst == rank:
                self._receives[src] = _chunks(destinations, [view.dtype for view in destinations], limit)
        self.follow()
        self.bytes: int = self._local.bytes + sum(
            chunk.bytes for chunks in self._receives.values() for chunk in chunks
        )
        """Bytes that one run writes on this rank."""

    @property
    def peers(self) -> list[int]:
        """The other ranks with which this rank exchanges messages."""
        return sorted(self._sends.keys() | self._receives.keys())

    def follow(self) -> None:
        """Read the addresses of all tensors again, after storages have moved in memory. Not collective."""
        self._rounds = _rounds(self._sends, self._receives)
        self._local = plan_copies(self._here)

    def run(self, deadline: float | None = None) -> int:
        """Copy the sources' current values to the destinations. When it returns, this rank's sources may
        change again.

        Args:
            deadline: by time.monotonic(), for messages in CPU memory. Those between GPUs have the timeout of
                the process group: with another one NCCL would block this process at every message.
        Returns: bytes written on this rank."""
        travelling: tuple[list[dist.Work], CopyPlan | None] = [], None
        if any(message.is_cuda for part in self._rounds for message in part.messages):
            deadline = None
        for number, part in enumerate(self._rounds):
            part.pack.run()
            requests = self._start(part)
            if number == 0:
                self._local.run()
            _finish(*travelling, deadline)  # the next round needs its half of the staging buffer
            travelling = requests, part.unpack
        _finish(*travelling, deadline)
        return self.bytes

    def _start(self, part: _Round) -> list[dist.Work]:
        """Start the messages of a round, and return their requests."""
        operations = [
            dist.P2POp(operation, message, peer)
            for operation, messages in ((dist.irecv, part.receives), (dist.isend, part.sends))
            for peer, message in sorted(messages.items())
        ]
        return dist.batch_isend_irecv(operations) if operations else []


def _finish(requests: list[dist.Work], unpack: CopyPlan | None, deadline: float | None) -> None:
    for request in requests:
        if deadline is None:
            request.wait()
        else:
            request.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    if unpack is not None:
        unpack.run()


STAGING_BYTES = 32 << 20
"""Most staging memory of one rank; half of it is filled or emptied while the other half travels. A longer
row still travels in one message."""


def _chunk_bytes(plan: ReshardPlan) -> int:
    """Return the size of a chunk, the same on every rank: the rank with the most messages must have room
    for one of each, twice."""
    messages = Counter(rank for pair in plan.copies if pair[0] != pair[1] for rank in pair)
    return STAGING_BYTES // (2 * max(messages.values(), default=1))


@dataclass
class _Chunk:
    """One message between two ranks: local views, and the dtypes in which they travel."""

    views: list[Tensor]
    dtypes: list[torch.dtype]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each view in the message, without the gaps between rows."""
        return [view.numel() * dtype.itemsize for view, dtype in zip(self.views, self.dtypes, strict=True)]

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    @property
    def starts(self) -> list[int]:
        """Byte at which each view begins, and where the message ends."""
        return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in self.sizes), initial=0))

    def in_place(self) -> Tensor | None:
        """Return the message as a uint8 view of the tensor's own memory, without a copy, or None if a staging
        buffer is needed. Sender and receiver decide independently."""
        view = self.views[0]
        if len(self.views) == 1 and view.is_contiguous() and view.dtype == self.dtypes[0]:
            return view.detach().view(-1).view(torch.uint8) if self.bytes == self.starts[-1] else None
        return None

    def staged(self, buffer: Tensor) -> list[Tensor]:
        """Return views into `buffer`, which holds the message, with the shapes and dtypes of the tensors in
        it."""
        return [
            buffer[start : start + size].view(dtype).view(view.shape)
            for start, size, view, dtype in zip(self.starts, self.sizes, self.views, self.dtypes)
        ]


def _chunks(views: Sequence[Tensor], dtypes: Sequence[torch.dtype], limit: int) -> list[_Chunk]:
    """Cut rectangles, in order, by rows into chunks of at most `limit` bytes. Shapes and dtypes alone decide,
    so both ends agree.

    What has a quarter of the limit or more is alone in its chunk, so that it need not be staged."""
    chunks: list[_Chunk] = []
    open_chunk: _Chunk | None = None
    for view, dtype in zip(views, dtypes, strict=True):
        row_bytes = view.shape[1] * dtype.itemsize
        for part in view.split(max(1, limit // row_bytes)):
            size = part.numel() * dtype.itemsize
            if 4 * size >= limit:
                chunks.append(_Chunk([part], [dtype]))
                continue
            if open_chunk is None or open_chunk.starts[-1] + size > limit:
                open_chunk = _Chunk([], [])
                chunks.append(open_chunk)
            open_chunk.views.append(part)
            open_chunk.dtypes.append(dtype)
    return chunks


@dataclass(frozen=True)
class _Round:
    """One round of a transfer: a message per peer and direction, the copies that pack the messages, and the
    copies that unpack them."""

    pack: CopyPlan
    sends: dict[int, Tensor]
    receives: dict[int, Tensor]
    unpack: CopyPlan

    @property
    def messages(self) -> list[Tensor]:
        return [*self.sends.values(), *self.receives.values()]


def _rounds(sends: dict[int, list[_Chunk]], receives: dict[int, list[_Chunk]]) -> list[_Round]:
    """Return the rounds, at least one. Chunk i of every pair of ranks travels in round i of both, so no
    two ranks wait for each other."""
    count = max((len(chunks) for chunks in (*sends.values(), *receives.values())), default=1)
    turns = [
        [{peer: chunks[i] for peer, chunks in side.items() if i < len(chunks)} for side in (sends, receives)]
        for i in range(count)
    ]
    needed = [
        sum(chunk.starts[-1] for side in turn for chunk in side.values() if chunk.in_place() is None)
        for turn in turns
    ]
    halves: dict[int, Tensor] = {}
    rounds = []
    for i, turn in enumerate(turns):
        at, sides = 0, []
        for chunks in turn:
            messages: dict[int, Tensor] = {}
            pairs: list[tuple[Tensor, Tensor]] = []  # view and its staged form
            for peer, chunk in chunks.items():
                messages[peer] = message = chunk.in_place()
                if message is None:
                    if i % 2 not in halves:
                        halves[i % 2] = torch.empty(
                            max(needed[i % 2 :: 2]), dtype=torch.uint8, device=chunk.views[0].device
                        )
                    messages[peer] = halves[i % 2][at : at + chunk.starts[-1]]
                    pairs += zip(chunk.views, chunk.staged(messages[peer]), strict=True)
                    at += chunk.starts[-1]
            sides.append((messages, pairs))
        (outgoing, to_pack), (incoming, to_unpack) = sides
        unpack = plan_copies((staged, view) for view, staged in to_unpack)
        rounds.append(_Round(plan_copies(to_pack), outgoing, incoming, unpack))
    return rounds


def plan_copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> CopyPlan:
    """Plan the copies of (source, destination) pairs. What is contiguous on both sides becomes one row."""
    flat = [
        (src.view(-1), dst.view(-1)) if src.is_contiguous() and dst.is_contiguous() else (src, dst)
        for src, dst in pairs
    ]
    return CopyPlan([dst for _, dst in flat], [src for src, _ in flat], torch.get_num_threads())


def src_view(copy: RectCopy, tensors: dict[str, Tensor]) -> Tensor:
    return _rectangle("source", tensors, copy.src_name, copy.src_row, copy.src_col, copy)


def dst_view(copy: RectCopy, tensors: dict[str, Tensor]) -> Tensor:
    return _rectangle("destination", tensors, copy.dst_name, copy.dst_row, copy.dst_col, copy)


def _rectangle(
    side: str, tensors: dict[str, Tensor], name: str, row: int, col: int, copy: RectCopy
) -> Tensor:
    if name not in tensors:
        raise ValueError(
            f"{side} tensor {name} is in the plan but not among the {len(tensors)} given: "
            f"{sorted(tensors)[:8]} ..."
        )
    tensor, end_row, end_col = tensors[name], row + copy.rows, col + copy.cols
    if tensor.dim() != 2 or tensor.shape[0] < end_row or tensor.shape[1] < end_col:
        raise ValueError(
            f"{side} tensor {name} has shape {list(tensor.shape)}; the plan uses [{row}:{end_row}, "
            f"{col}:{end_col}] of it."
        )
    return tensor[row:end_row, col:end_col]

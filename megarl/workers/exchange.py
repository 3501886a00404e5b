"""Move rows of token columns between ranks, with one message per pair of ranks.

message
    A message has the id of each sample and the digests of its columns. Then it has column after column,
    widest first, each with its samples in the order of the route.
order
    Every rank posts all its sends and receives at once, then waits, so no order of ranks can deadlock.
own rows
    A rank copies the rows that it already holds while the messages travel.
digests
    Digests are computed where a column is written. The receiver compares them with the rows that it has put
    in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.batch import Batch, column_dtype
from megarl.batch_invariants import Digests
from megarl.flow.columns import SAMPLED_COLUMNS
from megarl.invariants import InvariantError
from megarl.packing import Route
from megarl.ranges import profiled
from megarl.workers.store import PackedSamples

_BOUND_BY_TOKENS = ("tokens", "response_mask")  # one digest covers both

Formats = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Column -> dtype and shape of a token's row, for columns with more than one number per token."""


class MissingRowsError(ValueError):
    """Raised before anything is sent, if this rank lacks rows of a column that it should send or keep."""


def bytes_per_token(columns: Iterable[str], formats: Formats | None = None) -> int:
    """Return the bytes that one token takes in a message with these columns."""
    return sum(dtype.itemsize * math.prod(row) for dtype, row in (_format(name, formats) for name in columns))


class Moved(NamedTuple):
    """The columns that `move_rows` has received, and their digests (hashes per sample), not yet compared."""

    columns: dict[str, torch.Tensor]
    digests: Digests
    """The sender's digests of the tokens, and of every column but tokens and response_mask.

    They are not yet compared with `columns`."""


@profiled("exchange/move_rows")
def move_rows(
    held: Sequence[PackedSamples],
    columns: Sequence[str],
    route: Route,
    wanted: Sequence[int],
    lengths: Mapping[int, int],
    formats: Formats | None = None,
) -> Moved:
    """Send and receive columns by the route. Returns the columns of the `wanted` samples, one sample after
    another in that order.

    Every rank that a route names must call this.

    Args:
        held: this rank's blocks with the samples in `route.reads(wanted)`. Columns on another device travel
            through the CPU.
        columns: the same on every rank.
        route: this rank's messages. A wanted sample that is not incoming is copied from `held`.
        lengths: sample id -> number of tokens, for at least the samples that this rank sends, receives or
            wants.
        formats: the same on every rank.
    Raises: MissingRowsError for a column that `held` should have, or a sample of another length, before
    anything is sent. InvariantError for a message of other samples than planned."""
    message_format = _MessageFormat.of(columns, formats, lengths)
    digests: Digests = {name: {} for name in message_format.bound}
    for samples in held:
        for name, of_samples in samples.digests_for(columns).items():
            digests[name] |= of_samples
    # column -> sample -> a view of its rows
    pieces = {name: _rows_of_all(held, name, *of) for name, of in message_format.columns.items()}
    for sample in route.reads(wanted):
        if (num_here := len(pieces[columns[0]][sample])) != lengths[sample]:
            raise MissingRowsError(
                f"sample {sample} has {num_here} tokens on this rank, but {lengths[sample]} in the plan"
            )

    operations, messages = [], {}
    for peer in sorted({*route.outgoing, *route.incoming}):
        if ids := route.outgoing.get(peer):
            operations.append(dist.P2POp(dist.isend, message_format.pack(ids, pieces, digests), peer))
        if ids := route.incoming.get(peer):
            messages[peer] = torch.empty(message_format.num_bytes(ids), dtype=torch.uint8)
            operations.append(dist.P2POp(dist.irecv, messages[peer], peer))
    requests = dist.batch_isend_irecv(operations) if operations else []
    # Own rows are copied while the messages travel, received rows after the messages have arrived.
    moved, places = message_format.empty(wanted)
    received = {sample for ids in route.incoming.values() for sample in ids}
    own = [sample for sample in wanted if sample not in received]
    for name, rows in pieces.items():
        for sample in own:
            places[name][sample].copy_(rows[sample])
    for name in message_format.bound:
        moved.digests[name] |= {sample: digests[name][sample] for sample in own}
    for request in requests:
        request.wait()
    for peer, message in messages.items():
        message_format.unpack(message, peer, route.incoming[peer], places, moved.digests)
    return moved


@dataclass(frozen=True)
class _MessageFormat:
    """Order and formats of the bytes in a message between two ranks, the same at both ends."""

    columns: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Dtype and shape of a token's row, widest first, so that every column is aligned."""
    bound: list[str]
    """Columns whose digests travel with them."""
    lengths: Mapping[int, int]

    @staticmethod
    def of(columns: Iterable[str], formats: Formats | None, lengths: Mapping[int, int]) -> _MessageFormat:
        of_column = {name: _format(name, formats) for name in columns}
        bound = ["tokens", *(name for name in of_column if name not in _BOUND_BY_TOKENS)]
        widest_first = sorted(of_column.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
        return _MessageFormat(dict(widest_first), bound, lengths)

    def num_bytes(self, ids: Sequence[int]) -> int:
        return self._header_bytes(ids) + sum(self._column_bytes(ids))

    def _header_bytes(self, ids: Sequence[int]) -> int:
        return 8 * len(ids) * (1 + len(self.bound))

    def _column_bytes(self, ids: Sequence[int]) -> list[int]:
        num_tokens = sum(self.lengths[sample] for sample in ids)
        return [num_tokens * dtype.itemsize * math.prod(row) for dtype, row in self.columns.values()]

    def empty(self, wanted: Sequence[int]) -> tuple[Moved, dict[str, dict[int, torch.Tensor]]]:
        """Return uninitialized columns for the `wanted` samples, and column -> sample -> the view for its
        rows."""
        num_tokens = [self.lengths[sample] for sample in wanted]
        total = sum(num_tokens)
        out = {name: torch.empty(total, *row, dtype=dtype) for name, (dtype, row) in self.columns.items()}
        places = {
            name: dict(zip(wanted, column.split(num_tokens), strict=True)) for name, column in out.items()
        }
        return Moved(out, {name: {} for name in self.bound}), places

    def pack(
        self, ids: Sequence[int], pieces: Mapping[str, Mapping[int, torch.Tensor]], digests: Digests
    ) -> torch.Tensor:
        """Return the message with these samples' ids, digests and rows, as a uint8 tensor."""
        header = torch.tensor([[sample, *(digests[name][sample] for name in self.bound)] for sample in ids])
        parts = (header, *(pieces[name][sample] for name in self.columns for sample in ids))
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])

    def unpack(
        self,
        message: torch.Tensor,
        peer: int,
        ids: Sequence[int],
        places: Mapping[str, Mapping[int, torch.Tensor]],
        digests: Digests,
    ) -> None:
        """Copy the rows of a message into `places`, and its digests into `digests`. Raises: InvariantError
        for other samples than `ids`."""
        header, message = message.tensor_split([self._header_bytes(ids)])
        sent, *of_columns = header.view(torch.int64).view(len(ids), -1).T.tolist()
        if sent != list(ids):
            raise InvariantError(
                f"rank {peer} sent samples {sent[:8]}{'...' if len(sent) > 8 else ''} instead of "
                f"{list(ids[:8])}"
            )
        for name, values in zip(self.bound, of_columns, strict=True):
            digests[name] |= dict(zip(sent, values, strict=True))
        sizes = [self.lengths[sample] for sample in ids]
        parts = message.split(self._column_bytes(ids))
        for (name, (dtype, row)), data in zip(self.columns.items(), parts, strict=True):
            for sample, rows in zip(ids, data.view(dtype).view(-1, *row).split(sizes), strict=True):
                places[name][sample].copy_(rows)


def _format(name: str, formats: Formats | None) -> tuple[torch.dtype, tuple[int, ...]]:
    return formats[name] if formats and name in formats else (column_dtype(name), ())


def _rows_of_all(
    held: Sequence[PackedSamples], name: str, dtype: torch.dtype, row: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    rows: dict[int, torch.Tensor] = {}
    for samples in held:
        rows |= _rows_of(samples.batch, name, dtype, row)
    return rows


def _rows_of(held: Batch, name: str, dtype: torch.dtype, row: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """Return sample id -> view of the sample's rows of a column, on the CPU.

    Raises: MissingRowsError for a column that is not there or has another format."""
    column = getattr(held, name)
    if column is None or column.shape != (*held.tokens.shape, *row) or column.dtype != dtype:
        is_what = "is not there yet" if column is None else f"is {list(column.shape)} {column.dtype}"
        of_each = f"{list(row)} {dtype}" if row else dtype
        raise MissingRowsError(
            f"column {name} {is_what}, but must be {of_each} for {len(held.tokens)} tokens before "
            "it can be sent"
        )
    return dict(zip(held.sample_ids.tolist(), column.cpu().split(held.lengths.tolist()), strict=True))


def collect_samples(
    held: Sequence[PackedSamples],
    route: Route,
    wanted: Sequence[int],
    lengths: Mapping[int, int],
    formats: Formats | None = None,
) -> tuple[Batch, Digests]:
    """Send and receive samples by the route. Returns a batch with the `wanted` samples as the engines made
    them, and the senders' digests.

    The samples come with all columns of `formats`. Arguments and errors are those of `move_rows`. Returns the
    batch, and the senders' digests."""
    columns, digests = move_rows(held, (*SAMPLED_COLUMNS, *(formats or ())), route, wanted, lengths, formats)
    cu_seqlens = torch.tensor([0, *(lengths[sample] for sample in wanted)], dtype=torch.int64).cumsum(0)
    return Batch(
        sample_ids=torch.tensor(wanted, dtype=torch.int64), cu_seqlens=cu_seqlens, **columns
    ), digests

"""Move rows of token columns between ranks: one message per pair of ranks, with all columns of all its
samples.

message    for each sample its id and the digests of what it carries; then column after column, widest first, each with its
           samples in the order of the route
order      every rank posts all its sends and receives at once, then waits: no order of ranks can make a circle
own rows   what this rank holds itself is copied while the messages travel
digests    were made where the column was written; the receiver compares them with the rows it has put in place"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.batch import Batch, column_dtype
from megarl.batch_invariants import Digests
from megarl.flow.columns import SAMPLED_COLUMNS
from megarl.invariants import InvariantError
from megarl.packing import Route

_BOUND_BY_TOKENS = ("tokens", "response_mask")  # one digest covers both

Formats = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Column -> dtype and shape of a token's row, of columns that have more than one number per token."""


class MissingRowsError(ValueError):
    """This rank does not have what it is to send or keep. Nothing was sent."""


def bytes_per_token(columns: Iterable[str], formats: Formats | None = None) -> int:
    """Of a message with these columns."""
    return sum(dtype.itemsize * math.prod(row) for dtype, row in (_format(name, formats) for name in columns))


class Moved(NamedTuple):
    """What `move_rows` brought."""

    columns: dict[str, torch.Tensor]
    digests: Digests
    """As the sender had them: of the tokens, and of every column but tokens and response_mask. Not yet
    compared with `columns`."""


def move_rows(
    held: Batch | None,
    columns: Sequence[str],
    route: Route,
    wanted: Sequence[int],
    lengths: Mapping[int, int],
    formats: Formats | None = None,
    digests: Digests | None = None,
) -> Moved:
    """The named columns of the `wanted` samples, in that order. Called by every rank that the routes of
    others name.

    Args:
        held: what this rank has now; None: nothing. Columns on another device travel through the CPU.
        columns: the same on every rank.
        route: this rank's messages. A wanted sample that is not incoming is copied from `held`.
        lengths: sample id -> tokens, of at least the samples that this rank sends, receives or wants.
        formats: the same on every rank.
        digests: of the tokens of `held` and of the columns, made when they were written. None where `held`
            is.
    Raises: MissingRowsError for a sample or column that `held` should have, before anything is sent.
        InvariantError for a message of other samples than planned."""
    digests = digests or {}
    bound = ["tokens", *(name for name in columns if name not in _BOUND_BY_TOKENS)]
    dtypes, rows_of = ({name: _format(name, formats)[i] for name in columns} for i in (0, 1))
    columns = sorted(
        columns, key=lambda name: (-dtypes[name].itemsize, name)
    )  # widest first: all are aligned when viewed in place
    received = {sample for ids in route.incoming.values() for sample in ids}
    own = [sample for sample in wanted if sample not in received]
    needs_held = bool(own or route.outgoing)
    # column -> sample -> a view of its rows
    pieces = {
        name: _rows_of(held, name, dtypes[name], rows_of[name]) if needs_held else {} for name in columns
    }
    for sample in (s for ids in (own, *route.outgoing.values()) for s in ids):
        if sample not in pieces[columns[0]]:
            raise MissingRowsError(f"sample {sample} is not on this rank, which should have it")
        if (num_here := len(pieces[columns[0]][sample])) != lengths[sample]:
            raise MissingRowsError(
                f"sample {sample} has {num_here} tokens on this rank, but {lengths[sample]} in the plan"
            )

    operations, messages = [], {}
    for peer in sorted({*route.outgoing, *route.incoming}):
        if ids := route.outgoing.get(peer):
            header = torch.tensor([[sample, *(digests[name][sample] for name in bound)] for sample in ids])
            parts = (header, *(pieces[name][sample] for name in columns for sample in ids))
            message = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
            operations.append(dist.P2POp(dist.isend, message, peer))
        if ids := route.incoming.get(peer):
            num_bytes = _header_bytes(ids, bound) + bytes_per_token(columns, formats) * sum(
                lengths[s] for s in ids
            )
            messages[peer] = torch.empty(num_bytes, dtype=torch.uint8)
            operations.append(dist.P2POp(dist.irecv, messages[peer], peer))
    requests = dist.batch_isend_irecv(operations) if operations else []
    # Own rows find their place while the messages travel; those of the messages once they are here.
    num_tokens = [lengths[sample] for sample in wanted]
    out = {name: torch.empty(sum(num_tokens), *rows_of[name], dtype=dtypes[name]) for name in columns}
    places = {name: dict(zip(wanted, column.split(num_tokens), strict=True)) for name, column in out.items()}
    for name in columns:
        for sample in own:
            places[name][sample].copy_(pieces[name][sample])
    moved_digests: Digests = {name: {sample: digests[name][sample] for sample in own} for name in bound}
    for request in requests:
        request.wait()
    for peer, message in messages.items():
        ids = route.incoming[peer]
        sizes = [lengths[sample] for sample in ids]
        header, message = message.tensor_split([_header_bytes(ids, bound)])
        sent, *of_columns = header.view(torch.int64).view(len(ids), -1).T.tolist()
        if sent != list(ids):
            raise InvariantError(
                f"rank {peer} sent samples {sent[:8]}{'...' if len(sent) > 8 else ''} instead of "
                f"{list(ids[:8])}"
            )
        for name, values in zip(bound, of_columns, strict=True):
            moved_digests[name] |= dict(zip(sent, values, strict=True))
        for name, data in zip(
            columns,
            message.split([sum(sizes) * bytes_per_token([name], formats) for name in columns]),
            strict=True,
        ):
            for sample, rows in zip(
                ids, data.view(dtypes[name]).view(-1, *rows_of[name]).split(sizes), strict=True
            ):
                places[name][sample].copy_(rows)
    return Moved(out, moved_digests)


def _header_bytes(samples: Sequence[int], bound: Sequence[str]) -> int:
    return 8 * len(samples) * (1 + len(bound))


def _format(name: str, formats: Formats | None) -> tuple[torch.dtype, tuple[int, ...]]:
    return formats[name] if formats and name in formats else (column_dtype(name), ())


def _rows_of(
    held: Batch | None, name: str, dtype: torch.dtype, row: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    """Sample -> its rows of a column, not copied."""
    if held is None:
        return {}
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
    held: Batch | None,
    route: Route,
    wanted: Sequence[int],
    lengths: Mapping[int, int],
    formats: Formats | None = None,
    digests: Digests | None = None,
) -> tuple[Batch, Digests]:
    """This rank's `wanted` samples, in that order, as the engines made them, with all columns of `formats`;
    and their digests as the senders had them. Arguments and errors are those of `move_rows`."""
    columns, digests = move_rows(
        held, (*SAMPLED_COLUMNS, *(formats or ())), route, wanted, lengths, formats, digests
    )
    cu_seqlens = torch.tensor([0, *(lengths[sample] for sample in wanted)], dtype=torch.int64).cumsum(0)
    return Batch(
        sample_ids=torch.tensor(wanted, dtype=torch.int64), cu_seqlens=cu_seqlens, **columns
    ), digests

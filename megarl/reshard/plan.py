"""Plan which rectangle of which training rank's parameter is copied to which engine rank, from the atlases
(sharding specs) of both sides.

An atlas is a sharding spec. The plan is computed and checked once. Every element of a destination is written
exactly once, by exactly one source. Every element that no source writes is declared padding. The module is
pure arithmetic and needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapreplace

from megarl.reshard.atlas import Atlas, Box, LocalParam, Piece


class PlanError(ValueError):
    """Error of atlases (sharding specs) with a piece out of bounds, or with a destination element that no
    source, or more than one, would write."""


@dataclass(frozen=True, slots=True)
class RectCopy:
    """One copy of a rectangle of a source parameter into a destination parameter.

    dst[dst_row:dst_row+rows, dst_col:dst_col+cols] = src[src_row:src_row+rows, src_col:src_col+cols]."""

    src_name: str
    src_row: int
    src_col: int
    dst_name: str
    dst_row: int
    dst_col: int
    rows: int
    cols: int

    @property
    def num_elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class ReshardPlan:
    """The copies of a weight sync.

    `copies[source rank, destination rank]` is in the order in which both ends pack and unpack the copies."""

    copies: dict[tuple[int, int], tuple[RectCopy, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return every rank that sends or receives."""
        return tuple(sorted({rank for pair in self.copies for rank in pair}))

    def copies_to(self, rank: int) -> dict[int, tuple[RectCopy, ...]]:
        """Return source rank -> the copies that fill destination `rank`."""
        return {src: copies for (src, dst), copies in self.copies.items() if dst == rank}

    def num_bytes(self, itemsize: int) -> dict[tuple[int, int], int]:
        """Return (source rank, destination rank) -> bytes written, for elements of `itemsize` bytes."""
        return {
            pair: itemsize * sum(copy.num_elements for copy in copies) for pair, copies in self.copies.items()
        }


def make_plan(
    sources: dict[int, Atlas], destinations: dict[int, Atlas], ranks_per_node: int | None = None
) -> ReshardPlan:
    """Return the copies that fill every destination's parameters from the sources.

    If several sources hold the same elements, the destination's own rank wins, then a rank of its node. Among
    equals the rank that has sent least so far wins, so replicas share the work. Every rank that calls this
    with the same arguments gets the same plan.

    Args:
        ranks_per_node: number of consecutive ranks that share a node. None: all ranks do.

    Raises: PlanError naming the parameter and the rectangle that is missing, written twice or out of bounds.
    """
    _check_atlases(sources, "source")
    _check_atlases(destinations, "destination")
    senders = _Senders(ranks_per_node)
    replicas = _replicas(sources, senders)
    copies: dict[tuple[int, int], list[RectCopy]] = {}
    for rank, atlas in sorted(destinations.items()):
        for name, param in atlas.items():
            for piece in param.pieces:
                for source, copy in _fill(rank, name, piece, replicas.get(piece.hf_name, {}), senders):
                    copies.setdefault((source, rank), []).append(copy)
    return ReshardPlan({pair: tuple(rects) for pair, rects in sorted(copies.items())})


_Held = list[tuple[int, str, Piece]]
"""Every (rank, parameter, piece) that holds a box, by rank."""


class _Holders:
    """The ranks that hold some boxes, in order. Boxes that the same ranks hold share this object.

    Args:
        ranks: rank of each entry of `_Held`.
        ranks_per_node: number of consecutive ranks that share a node, or None."""

    def __init__(self, ranks: tuple[int, ...], ranks_per_node: int | None) -> None:
        self.first_of: dict[int, int] = {}
        """Rank -> its first entry."""
        self.on_node: dict[int, list[int]] = {}
        """Node -> its entries."""
        self.least = [(0, entry) for entry in range(len(ranks))]
        """Heap of (elements sent, entry). An entry with an outdated count is renewed when it gets to the
        top."""
        for entry, rank in enumerate(ranks):
            self.first_of.setdefault(rank, entry)
            if ranks_per_node is not None:
                self.on_node.setdefault(rank // ranks_per_node, []).append(entry)


class _Senders:
    """Chooses the sender of elements that several ranks hold: the destination itself, else one of its node,
    else any; among these the one that has sent least, and the first of several.

    The choice takes no longer for more replicas: each of 1,024 ranks plans for all of them."""

    def __init__(self, ranks_per_node: int | None) -> None:
        self._ranks_per_node = ranks_per_node
        self._holders: dict[tuple[int, ...], _Holders] = {}
        self.sent: Counter[int] = Counter()
        """Number of elements that each rank sends to others so far."""

    def holders(self, held: _Held) -> _Holders:
        ranks = tuple(rank for rank, _, _ in held)
        if ranks not in self._holders:
            self._holders[ranks] = _Holders(ranks, self._ranks_per_node)
        return self._holders[ranks]

    def choose(self, held: _Held, holders: _Holders, destination: int) -> tuple[int, str, Piece]:
        if (own := holders.first_of.get(destination)) is not None:
            return held[own]
        node = None if self._ranks_per_node is None else destination // self._ranks_per_node
        if node is not None and (near := holders.on_node.get(node)):
            return held[min(near, key=lambda entry: self.sent[held[entry][0]])]
        least = holders.least
        while least[0][0] != (sent := self.sent[held[least[0][1]][0]]):
            heapreplace(least, (sent, least[0][1]))
        return held[least[0][1]]


_Replicas = dict[str, dict[Box, tuple[_Held, _Holders]]]
"""Canonical tensor -> box of it -> who holds the box."""


def _replicas(sources: dict[int, Atlas], senders: _Senders) -> _Replicas:
    found: dict[str, dict[Box, _Held]] = {}
    for rank, atlas in sorted(sources.items()):
        for name, param in atlas.items():
            for piece in param.pieces:
                held = found.setdefault(piece.hf_name, {})
                held.setdefault(piece.box, []).append((rank, name, piece))
    return {
        hf_name: {box: (held, senders.holders(held)) for box, held in boxes.items()}
        for hf_name, boxes in found.items()
    }


def _fill(
    rank: int, name: str, piece: Piece, replicas: dict[Box, tuple[_Held, _Holders]], senders: _Senders
) -> Iterable[tuple[int, RectCopy]]:
    """Yield (source rank, copy) of each part of one destination piece.

    Written parts are removed from `missing`, so nothing is written twice."""
    whole = piece.box
    missing = [whole]
    holders = [(box, *senders.choose(*found, rank)) for box, found in replicas.items() if whole.overlap(box)]
    for box, source, src_name, src in sorted(holders, key=lambda h: h[1] != rank):
        for part in filter(None, map(box.overlap, missing)):
            if source != rank:
                senders.sent[source] += part.area
            row, end_row, col, end_col = part
            yield (
                source,
                RectCopy(
                    src_name,
                    src.local_row + row - src.row_start,
                    src.local_col + col - src.col_start,
                    name,
                    piece.local_row + row - piece.row_start,
                    piece.local_col + col - piece.col_start,
                    end_row - row,
                    end_col - col,
                ),
            )
        missing = [rest for wanted in missing for rest in wanted.without(box)]
    if missing:
        raise PlanError(f"[rank {rank}] {name}: no source holds {piece.hf_name}{missing[0]}.")


def _check_atlases(atlases: dict[int, Atlas], side: str) -> None:
    """Raise PlanError if pieces of a parameter are out of bounds, overlap, or leave a gap outside of the
    padding rows."""
    checked: set[int] = set()  # ranks with the same layout may share their atlas
    for rank, atlas in atlases.items():
        if id(atlas) not in checked:
            checked.add(id(atlas))
            for name, param in atlas.items():
                _check_param(f"[rank {rank}] {side} {name}", param)


def _check_param(where: str, param: LocalParam) -> None:
    full = Box(0, param.rows - param.padding_rows, 0, param.cols)
    active: list[tuple[Box, Piece]] = []  # pieces that may reach rows from here on
    area = 0
    for piece in sorted(param.pieces, key=lambda piece: piece.local_row):
        local = piece.local_box
        if piece.rows <= 0 or piece.cols <= 0:
            raise PlanError(f"{where}: the piece {_show(piece)} is empty.")
        if local.overlap(full) != local:
            raise PlanError(f"{where}: {_show(piece)} lands on {local}, outside of {full}.")
        active = [other for other in active if other[0].row_end > local.row_start]
        for other, other_piece in active:
            if both := local.overlap(other):
                raise PlanError(f"{where}: {_show(piece)} and {_show(other_piece)} both land on {both}.")
        active.append((local, piece))
        area += local.area
    # Pieces inside the bounds without overlap fill everything exactly if their areas add up.
    if area != full.area:
        missing = [full]
        for piece in param.pieces:
            missing = [rest for hole in missing for rest in hole.without(piece.local_box)]
        raise PlanError(f"{where}: no piece fills {missing[0]} of its {param.rows} x {param.cols} elements.")


def _show(piece: Piece) -> str:
    return f"{piece.hf_name}{piece.box}"

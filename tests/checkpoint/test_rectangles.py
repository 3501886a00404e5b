"""Stretches of parameters as rectangles, and whether rectangles tile a tensor: against element-by-element
references."""

from __future__ import annotations

import random

import pytest
import torch

from megarl.checkpoint.rectangles import Box, rectangles_of, tiling_problem
from megarl.reshard.atlas import LocalParam, Piece


def test_every_stretch_gives_its_elements_where_they_belong():
    """A parameter of 3 rows of `a` from row 2 on, 2 rows of `b`, one row of padding; columns 4 to 9 of 12."""
    param = LocalParam(6, 5, (Piece("a", 2, 5, 4, 9, 0, 0), Piece("b", 0, 2, 4, 9, 3, 0)), padding_rows=1)
    sizes, flat = {"a": (7, 12), "b": (2, 12)}, torch.arange(30.0)
    where = {i: ("a", 2 + i // 5, 4 + i % 5) if i < 15 else ("b", i // 5 - 3, 4 + i % 5) for i in range(25)}
    for start in range(30):
        for end in range(start + 1, 31):
            found = {}
            pieces = list(rectangles_of("weights", param, sizes, flat[start:end], start))
            assert len(pieces) <= 3 * len({r.name for r in pieces})
            for r in pieces:
                assert (
                    r.values.shape == (r.box.row_end - r.box.row_start, r.box.col_end - r.box.col_start)
                    and r.shape == sizes[r.name]
                )
                for i, row in enumerate(r.values.tolist()):
                    for j, value in enumerate(row):
                        found[int(value)] = (r.name, r.box.row_start + i, r.box.col_start + j)
            assert found == {i: place for i, place in where.items() if start <= i < end}


def test_rectangles_are_views():
    param = LocalParam(2, 3, (Piece("a", 0, 2, 0, 3, 0, 0),))
    flat = torch.zeros(6)
    for r in rectangles_of("weights", param, {"a": (2, 3)}, flat[2:], 2):
        r.values.fill_(1.0)
    assert flat.tolist() == [0, 0, 1, 1, 1, 1]


def test_vectors_keep_their_shape():
    (r,) = rectangles_of(
        "weights", LocalParam(4, 1, (Piece("v", 0, 4, 0, 1, 0, 0),)), {"v": (4, 1)}, torch.arange(4.0)[1:3], 1
    )
    assert (r.shape, r.box, r.values.tolist()) == ((4,), Box(1, 3, 0, 1), [[1.0], [2.0]])


def test_memory_that_is_not_contiguous_is_refused():
    param = LocalParam(2, 4, (Piece("a", 0, 2, 0, 2, 0, 2),))
    with pytest.raises(ValueError, match="a: stored beside other columns"):
        list(rectangles_of("weights", param, {"a": (2, 2)}, torch.zeros(8)))


def cut(box: Box, rng: random.Random) -> list[Box]:
    """A random tiling."""
    if rng.random() < 0.3 or box.area == 1:
        return [box]
    if rng.random() < 0.5 and box.row_end - box.row_start > 1:
        at = rng.randrange(box.row_start + 1, box.row_end)
        return cut(box._replace(row_end=at), rng) + cut(box._replace(row_start=at), rng)
    if box.col_end - box.col_start > 1:
        at = rng.randrange(box.col_start + 1, box.col_end)
        return cut(box._replace(col_end=at), rng) + cut(box._replace(col_start=at), rng)
    return [box]


@pytest.mark.parametrize("seed", range(50))
def test_tilings_pass_and_their_mutations_do_not(seed):
    rng = random.Random(seed)
    boxes = cut(Box(0, 7, 0, 9), rng)
    rng.shuffle(boxes)
    assert tiling_problem((7, 9), boxes) is None
    victim = rng.randrange(len(boxes))
    assert "elements are missing" in tiling_problem((7, 9), boxes[:victim] + boxes[victim + 1 :])
    extra = Box(*[rng.randrange(7)] * 2, *[rng.randrange(9)] * 2)
    extra = extra._replace(row_end=extra.row_start + 1, col_end=extra.col_start + 1)
    assert "is there twice" in tiling_problem((7, 9), [*boxes, extra])
    assert "is outside" in tiling_problem((6, 9), boxes)

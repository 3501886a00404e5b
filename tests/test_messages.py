"""Messages between processes come back equal and of the same type, or not at all.

pytest tests/test_messages.py"""

from __future__ import annotations

import datetime
import decimal
import pickle
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from megarl.messages import MessageError, decode, encode, packable
from megarl.reshard.atlas import Atlas, LocalParam, Piece
from megarl.reshard.destination import Arrival
from megarl.reshard.plan import RectCopy
from megarl.reshard.transports.cuda_ipc import CudaMemory
from megarl.reshard.transports.exported import Exported, Placed
from megarl.reshard.transports.shared_memory import SharedMemory
from megarl.rollout.puller import Order


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True)
class Path:
    points: dict[int, tuple[Point, ...]]
    name: str | None = None


EXPORTED = Exported(
    (SharedMemory(7, 2**40, 3, 99, 64), CudaMemory("GPU-0", (b"\0\xff", 6, 0, b"r", 1, b"e", True), 6)),
    {"weight": Placed(1, 8, 2, 3, 4, "bfloat16")},
)
COPY = RectCopy("a", 0, 1, "b", 2, 3, 4, 5)


@pytest.mark.parametrize(
    "value, kind",
    [
        (Path({3: (Point(1, float("inf")), Point(2, -0.0))}, "ü"), Path),
        ((True, "text"), tuple[bool, str]),
        ([0, 2**64 - 1, -(2**63)], list[int]),
        ({("weights", "a", (2, 3))}, set[tuple[str, str, tuple[int, ...]]]),
        (None, str | None),
        ({"a": LocalParam(2, 3, (Piece("hf", 0, 2, 0, 3, 0, 0),), 1)}, Atlas),
        (Arrival(3, [2**64 - 1], None, EXPORTED, None), Arrival),
        (Order({0: Arrival(1, [5])}, {0: (EXPORTED, (COPY,)), 1: (EXPORTED, None)}, {0: (COPY,)}), Order),
    ],
)
def test_a_value_of_a_declared_type_comes_back(value, kind):
    again = decode(encode(value), kind)
    assert again == value and type(again) is type(value)


@pytest.mark.parametrize(
    "data, kind",
    [
        (encode({"points": {}, "name": 3}), Path),
        (encode({"name": "no points"}), Path),
        (encode("text"), int),
        (encode([1])[:-1], list[int]),
        (pickle.dumps([1]), list[int]),
        (encode({"a": 1}) + b"\0", dict[str, int]),
        (b"\xc7\x01\x63x", Any),
        (b"\xc7\x01\x02x", Any),
    ],
)
def test_what_is_no_message_of_the_type_is_refused(data, kind):
    with pytest.raises(MessageError):
        decode(data, kind)


def test_a_value_that_no_message_can_hold_is_refused():
    with pytest.raises(TypeError):
        encode(object())
    with pytest.raises(TypeError, match="a complex cannot be sent to another process"):
        packable({"a": [1j]})


BERLIN = datetime.timezone(datetime.timedelta(hours=2))
ROW = {
    "plain": [None, True, 1, -1.5, "text", b"bytes"],
    "large": [10**400, -(2**63) - 1, 2**64],
    "time": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, BERLIN),
    "naive": datetime.datetime(2026, 1, 2),
    "day": datetime.date(2026, 1, 2),
    "clock": datetime.time(3, 4, 5, 6),
    "span": datetime.timedelta(-3, 4, 5),
    "price": decimal.Decimal("1.20"),
    "id": uuid.UUID(int=5),
    "map": [("a", 1), ("b", {"deep": (datetime.date(1, 1, 1),)})],
}


def test_every_value_of_a_row_comes_back_with_its_type():
    again = decode(encode(packable(ROW)), dict[str, Any])
    assert again == ROW
    assert repr(again) == repr(ROW)  # of the same types inside too

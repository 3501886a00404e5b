"""Encode messages between processes as MessagePack of declared types.

    data = encode(Arrival(version=3, digests=[17]))
    decode(data, Arrival)                                the same value, or a MessageError

A type is a dataclass, a NamedTuple, a msgspec.Struct, or built of these and Python's own types: `dict[str,
Arrival]`, `str | None`. Reading a message never runs code of the sender, unlike reading a pickle. The module
imports no other part of megarl and no torch."""

from __future__ import annotations

import datetime
import decimal
import functools
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class MessageError(ValueError):
    """Raised for bytes that are not a message of the expected type."""


def encode(value: object) -> bytes:
    """Return a value as MessagePack bytes. Raises TypeError if no message can hold the value's type."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Return the value of type `kind` that the MessagePack bytes hold. Raises MessageError if they do not
    hold one."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise MessageError(f"a message that should be {kind} is not: {error}") from error


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(kind, ext_hook=from_extension)


# A row of a data set may hold values that MessagePack has no type for. These types are sent as text. A
# subclass comes before its base class.
_Form = tuple[type, Callable[[Any], str], Callable[[str], object]]
_FORMS: dict[int, _Form] = {
    1: (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    2: (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    3: (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    4: (
        datetime.timedelta,
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda text: datetime.timedelta(*map(int, text.split())),
    ),
    5: (decimal.Decimal, str, decimal.Decimal),
    6: (uuid.UUID, str, uuid.UUID),
    7: (int, hex, lambda text: int(text, 16)),
}
_TUPLE = 8
_INTEGERS = range(-(2**63), 2**64)


def packable(value: object) -> object:
    """Return the value of a data set's row in a form that `encode` accepts. Raises TypeError for a type that
    rows do not hold.

    `decode` returns an equal value of the same type, in a place of type `Any`. A datetime keeps its offset
    from UTC, not the name of its time zone.

    Raises: TypeError for a type that rows do not hold."""
    if isinstance(value, dict):
        return {name: packable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [packable(part) for part in value]
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, encode([packable(part) for part in value]))
    if value is None or isinstance(value, str | bool | float | bytes):
        return value
    if isinstance(value, int) and value in _INTEGERS:
        return value
    for code, (kind, to_text, _) in _FORMS.items():
        if isinstance(value, kind):
            return msgspec.msgpack.Ext(code, to_text(value).encode())
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def from_extension(code: int, data: memoryview) -> object:
    """Return the value (a date, a tuple, ...) that `packable` put into a MessagePack extension. Raises
    MessageError for an unknown code."""
    if code == _TUPLE:
        return tuple(decode(data, list))
    if code not in _FORMS:
        raise MessageError(f"unknown extension {code}")
    return _FORMS[code][2](str(data, "utf-8"))

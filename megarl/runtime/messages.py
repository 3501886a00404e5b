"""Define the messages between driver and ranks, as MessagePack of declared types. Reading one runs no code of
the sender.

    driver -> ranks     Call, Shutdown, Kill
    ranks -> driver     Reply, Event, Terminated

Arguments, results and the payload of events are encoded separately, so that a rank that skips a call does not
decode its arguments. Decoding follows the declared types, which are the annotations of a method."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megarl.failures import ExplainedError, last_line
from megarl.messages import from_extension, packable
from megarl.runtime import signing

_HOSTING = str(Path(__file__).with_name("hosting.py"))


class Call(msgspec.Struct, tag="call", frozen=True):
    """One call of a role's method on some ranks. `label` says when it was issued, for example "step 3"."""

    role: str
    ranks: tuple[int, ...]
    method: str
    label: str | None
    arguments: bytes


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """The last command of a job: ranks reply to it and return from their loop."""


class Kill(msgspec.Struct, tag="kill", frozen=True):
    """The command that ends a job early: ranks exit at once with this code."""

    exit_code: int


class Failure(msgspec.Struct, frozen=True):
    """An exception that a rank has raised, as text, because its class may not be importable in the driver."""

    role: str
    method: str
    label: str | None
    error: str
    traceback: str
    read_on: str | None = None
    """Where the documentation explains the error, if its message is enough without the traceback."""

    @classmethod
    def of(cls, error: BaseException, role: str, method: str, label: str | None) -> Failure:
        """Return an exception as text, without the traceback's frames between the worker loop and the role's
        method."""
        last = "".join(traceback.format_exception_only(error)).strip()
        here = error.__traceback__
        below = here and here.tb_next or here  # without the caller's frame
        while here is not None:
            if here.tb_frame.f_code.co_filename == _HOSTING and here.tb_next is not None:
                below = here.tb_next
            here = here.tb_next
        whole = "".join(traceback.format_exception(type(error), error, below)).rstrip()
        if isinstance(error, ExplainedError):
            return cls(role, method, label, _printable(last_line(error)), _printable(whole), error.read_on)
        return cls(role, method, label, _printable(last), _printable(whole))


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """The reply of a rank to command `index`: a value, or a failure. An aborted call has neither."""

    index: int
    rank: int
    value: bytes = b""
    seconds: float = 0.0
    """Seconds of the call on this rank."""
    ended: float = 0.0
    """`time.time()` on the rank's clock when the call ended."""
    failure: Failure | None = None


class Event(msgspec.Struct, tag="event", frozen=True):
    """A report that a rank sends outside of results: a name and a plain value."""

    rank: int
    name: str
    payload: object = None


class Terminated(msgspec.Struct, tag="terminated", frozen=True):
    """A rank tells the driver that it has received SIGTERM."""

    rank: int


Command = Call | Shutdown | Kill
Report = Reply | Event | Terminated
_decode_command: Callable[[bytes | memoryview], Command] = msgspec.msgpack.Decoder(Command).decode
_decode_report: Callable[[bytes | memoryview], Report] = msgspec.msgpack.Decoder(Report).decode


class CannotSend(TypeError):
    """Raised for a value that cannot be encoded in a message."""


def encode(value: object) -> bytes:
    """Return a value of plain types, dataclasses and messages as MessagePack bytes. Raises CannotSend for
    other values.

    numpy's numbers become Python's, and paths become strings.

    Raises: CannotSend, without naming the value."""
    try:
        try:
            return msgspec.msgpack.encode(value, enc_hook=_plain)
        except OverflowError:  # an integer of more than 64 bits, for example in a row of a data set
            return msgspec.msgpack.encode(packable(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CannotSend(str(error)) from None


def signed_command(index: int, command: Command) -> bytes:
    """Return command number `index` of a job as a signed message. Raises: CannotSend."""
    return signing.sign(encode(command), f"cmd/{index}")


def read_command(index: int, data: bytes) -> Command:
    """Return the command of a message. Raises: ForgedMessage unless it is the job's command number
    `index`."""
    return _decode_command(signing.verify(data, f"cmd/{index}"))


def signed_report(report: Report) -> bytes:
    """Return a report as a signed message. Raises: CannotSend."""
    return signing.sign(encode(report), "report")


def read_report(data: bytes | memoryview) -> Report:
    """Return the report of a message. Raises: ForgedMessage unless a rank of this job has signed it."""
    return _decode_report(signing.verify(data, "report"))


def _plain(value: object) -> int | float | str:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise TypeError(f"{_name(type(value))} is no plain value and no dataclass")


def encode_arguments(role: str, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes:
    """Return the arguments of a call as MessagePack bytes. Raises: CannotSend that names role, method,
    argument and type."""

    def part(name: int | str, value: object) -> bytes:
        try:
            return encode(value)
        except CannotSend as error:
            raise CannotSend(
                f"[{role}] {method}: argument {name} ({_name(type(value))}) cannot be sent: {error}"
            ) from None

    positional = [part(number, value) for number, value in enumerate(args, 1)]
    return encode((positional, {name: part(name, value) for name, value in kwargs.items()}))


def decode_arguments(method: Callable[..., object], data: bytes) -> inspect.BoundArguments:
    """Return the arguments that `encode_arguments` encoded, bound to the method. Raises TypeError if they do
    not fit its annotations.

    Arguments without an annotation are of plain types.

    Raises: TypeError that names the argument, for a value of another type, for an unreadable annotation, and
    for arguments that the method does not take."""
    args, kwargs = _ARGUMENTS.decode(data)
    bound = inspect.signature(method).bind(*args, **kwargs)
    function = inspect.unwrap(getattr(method, "__func__", method))
    for name, given in bound.arguments.items():
        kind, decoder = bound.signature.parameters[name].kind, _decoder(function, name)
        if kind is inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(_decode(decoder, part, f"argument {name}") for part in given)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {
                key: _decode(decoder, part, f"argument {key}") for key, part in given.items()
            }
        else:
            bound.arguments[name] = _decode(decoder, given, f"argument {name}")
    return bound


_ARGUMENTS = msgspec.msgpack.Decoder(tuple[list[bytes], dict[str, bytes]])


def decode_result(interface: type | None, method: str, data: bytes) -> object:
    """Return the decoded result of a call. Raises TypeError if it does not fit the return annotation of the
    interface's method."""
    function = getattr(interface, method, None)
    decoder = _PLAIN if function is None else _decoder(inspect.unwrap(function), "return")
    return _decode(decoder, data, "its result")


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes, which: str) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise TypeError(f"{which} is not of the declared type: {error}") from None


_PLAIN = msgspec.msgpack.Decoder(Any, ext_hook=from_extension)


@functools.cache
def _decoder(function: Callable[..., object], name: str) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder for a parameter of a function, or for its result ("return"), by its annotation."""
    try:
        hint = typing.get_type_hints(function).get(name, Any)
    except NameError as error:
        raise TypeError(f"the annotations of {function.__qualname__} cannot be read: {error}") from None
    hint = _with_integers(hint) if name == "return" else hint
    try:
        return msgspec.msgpack.Decoder(hint, ext_hook=from_extension)
    except TypeError as error:
        which = f"the result of {function.__qualname__}" if name == "return" else f"argument {name}"
        raise TypeError(f"{which} is declared as {hint}, which no message can hold: {error}") from None


def _with_integers(hint: Any) -> Any:
    """Return the type with `int | float` for float, so that a count among metrics stays an integer."""
    parts, origin = typing.get_args(hint), typing.get_origin(hint)
    if hint is float:
        return int | float
    if not parts or origin is typing.Literal:
        return hint
    changed = tuple(_with_integers(part) for part in parts)
    return typing.Union[changed] if origin in (types.UnionType, typing.Union) else origin[changed]


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _printable(text: str) -> str:
    """Return the text with characters that UTF-8 cannot encode, for example from a file name, as backslash
    escapes."""
    return text.encode("utf-8", "backslashreplace").decode()

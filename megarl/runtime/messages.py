"""Define the messages between driver and ranks: declared types, encoded as msgpack.

Decoding a message runs none of its content as code.

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

import msgspec

from megarl.messages import from_extension, packable

_HOSTING = str(Path(__file__).with_name("hosting.py"))


class Call(msgspec.Struct, tag="call", frozen=True):
    """One call of a method on some ranks. `label` gives the time, for example "step 3"; errors name it."""

    role: str
    ranks: tuple[int, ...]
    method: str
    label: str | None
    arguments: bytes


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """The last command of a job: ranks reply and return."""


class Kill(msgspec.Struct, tag="kill", frozen=True):
    """Ends the job early: ranks exit at once with this code."""

    exit_code: int


class Failure(msgspec.Struct, frozen=True):
    """An exception of a rank, as text: its class may not be importable in the driver."""

    role: str
    method: str
    label: str | None
    error: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, role: str, method: str, label: str | None) -> Failure:
        """Describe an exception, without the frames of the transport above the method."""
        last = "".join(traceback.format_exception_only(error)).strip()
        below = error.__traceback__.tb_next or error.__traceback__  # without the caller's frame
        here = error.__traceback__
        while here is not None:
            if here.tb_frame.f_code.co_filename == _HOSTING and here.tb_next is not None:
                below = here.tb_next
            here = here.tb_next
        whole = "".join(traceback.format_exception(type(error), error, below)).rstrip()
        return cls(role, method, label, _printable(last), _printable(whole))


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """The reply of a rank to command `index`: a value, or a failure."""

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
    """The rank has received SIGTERM."""

    rank: int


Command = Call | Shutdown | Kill
Report = Reply | Event | Terminated
_COMMAND, _REPORT = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(Report)


def decode_command(data: bytes | memoryview) -> Command:
    """Decode a message of the driver."""
    return _COMMAND.decode(data)


def decode_report(data: bytes | memoryview) -> Report:
    """Decode a message of a rank."""
    return _REPORT.decode(data)


class CannotSend(TypeError):
    """A value cannot be encoded in a message."""


def encode(value: object) -> bytes:
    """Encode a value of plain types, dataclasses and messages.

    numpy's numbers become Python's, and paths become strings.

    Raises: CannotSend, without naming the value."""
    try:
        try:
            return msgspec.msgpack.encode(value, enc_hook=_plain)
        except OverflowError:  # an integer of more than 64 bits, for example in a row of a data set
            return msgspec.msgpack.encode(packable(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CannotSend(str(error)) from None


def _plain(value: object) -> int | float | str:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{_name(type(value))} is no plain value and no dataclass")


def encode_arguments(role: str, method: str, args: tuple, kwargs: Mapping[str, object]) -> bytes:
    """Encode the arguments of a call. Raises: CannotSend that names role, method, argument and type."""
    named = {str(position): value for position, value in enumerate(args)} | dict(kwargs)
    parts: dict[str, bytes] = {}
    for name, value in named.items():
        try:
            parts[name] = encode(value)
        except CannotSend as error:
            which = f"argument {int(name) + 1}" if name.isdecimal() else f"argument {name}"
            raise CannotSend(
                f"[{role}] {method}: {which} ({_name(type(value))}) cannot be sent: {error}"
            ) from None
    return msgspec.msgpack.encode(parts)


def decode_arguments(method: Callable[..., object], data: bytes) -> tuple[list, dict[str, object]]:
    """Decode the result of `encode_arguments` by the annotations of the method.

    Arguments without an annotation are of plain types.

    Raises: TypeError that names the argument, for a value of another type and for an unreadable annotation.
    """
    function = inspect.unwrap(getattr(method, "__func__", method))
    parameters = _parameters(function, inspect.ismethod(method))
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for name, part in msgspec.msgpack.decode(data, type=dict[str, bytes]).items():
        decoder = parameters.decoder(int(name) if name.isdecimal() else name)
        try:
            value = decoder.decode(part)
        except msgspec.ValidationError as error:
            which = parameters.name(int(name)) if name.isdecimal() else name
            raise TypeError(f"argument {which} is not of the declared type: {error}") from None
        if name.isdecimal():
            args.append(value)
        else:
            kwargs[name] = value
    return args, kwargs


def decode_result(interface: type | None, method: str, data: bytes) -> object:
    """Decode the result of a call by the return annotation of the interface's method, else as plain types.

    Raises: TypeError for a value of another type."""
    decoder = _ANY if interface is None else _result_decoder(interface, method)
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise TypeError(f"its result is not of the declared type: {error}") from None


_ANY = msgspec.msgpack.Decoder(ext_hook=from_extension)


class _Parameters:
    """A decoder for each argument of one function."""

    def __init__(self, function: Callable[..., object], is_method: bool):
        hints = _hints(function)
        declared = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
        self._positional: list[tuple[str, msgspec.msgpack.Decoder]] = []
        self._named: dict[str, msgspec.msgpack.Decoder] = {}
        self._more: tuple[str, msgspec.msgpack.Decoder] = ("", _ANY)
        self._more_named = _ANY
        for parameter in declared:
            decoder = _decoder(hints.get(parameter.name, typing.Any), f"argument {parameter.name}")
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._more = parameter.name, decoder
            elif parameter.kind is parameter.VAR_KEYWORD:
                self._more_named = decoder
            else:
                self._named[parameter.name] = decoder
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    self._positional.append((parameter.name, decoder))

    def decoder(self, argument: int | str) -> msgspec.msgpack.Decoder:
        """Return the decoder of an argument by its position or name."""
        if isinstance(argument, str):
            return self._named.get(argument, self._more_named)
        return self._at(argument)[1]

    def name(self, position: int) -> str:
        """Return the name of a positional argument."""
        return self._at(position)[0] or str(position + 1)

    def _at(self, position: int) -> tuple[str, msgspec.msgpack.Decoder]:
        return self._positional[position] if position < len(self._positional) else self._more


@functools.cache
def _parameters(function: Callable[..., object], is_method: bool) -> _Parameters:
    return _Parameters(function, is_method)


@functools.cache
def _result_decoder(interface: type, method: str) -> msgspec.msgpack.Decoder:
    function = getattr(interface, method, None)
    if function is None:
        return _ANY
    hint = _with_integers(_hints(inspect.unwrap(function)).get("return", typing.Any))
    return _decoder(hint, f"the result of {interface.__name__}.{method}")


def _with_integers(hint: object) -> object:
    """Return the type with `int | float` for float, so that a count among metrics stays an integer."""
    parts, origin = typing.get_args(hint), typing.get_origin(hint)
    if hint is float:
        return int | float
    if not parts or origin is typing.Literal:
        return hint
    changed = tuple(_with_integers(part) for part in parts)
    return typing.Union[changed] if origin in (types.UnionType, typing.Union) else origin[changed]


def _hints(function: Callable[..., object]) -> dict[str, object]:
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        raise TypeError(f"the annotations of {function.__qualname__} cannot be read: {error}") from None


def _decoder(hint: object, of: str) -> msgspec.msgpack.Decoder:
    try:
        return msgspec.msgpack.Decoder(hint, ext_hook=from_extension)
    except TypeError as error:
        raise TypeError(f"{of} is declared as {hint}, which no message can hold: {error}") from None


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _printable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode, for example from a file name."""
    return text.encode("utf-8", "backslashreplace").decode()

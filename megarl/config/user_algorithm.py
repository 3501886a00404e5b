"""Load the user's own algorithm: --algorithm path/to/file.py:Class."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence

from megarl.files.user_code import load_from_file

_WANTED = (
    "Wanted path/to/file.py:Class, a frozen dataclass that is a subclass of megarl.algorithms.Algorithm."
)


def is_in_file(name: str) -> bool:
    """Return whether a value of --algorithm or --policy-loss names something in a file of the user's."""
    return ".py:" in name


@functools.cache
def load_user_algorithm(name: str) -> type:
    """Run the user's file and return the algorithm class that it defines. A later call returns the same
    class.

    The class gets `name` as its name, so that resolved.args names the file.
    Raises: ValueError if there is no such file or class, the file fails, or the class is no algorithm."""
    cls = load_from_file(name, "--algorithm", "megarl_algorithm_", _WANTED)
    for rule in _broken_rules(cls):
        raise ValueError(f"{rule} {_WANTED}")
    cls.name = name
    return cls


def with_user_algorithms(algorithms: Mapping[str, type], argv: Sequence[str]) -> dict[str, type]:
    """Return the algorithms and those in files that `argv` names, for --help.

    Raises: ValueError as `load_user_algorithm`."""
    found = dict(algorithms)
    for flag, value in zip(argv, (*argv[1:], ""), strict=True):
        name, equals, after = flag.partition("=")
        value = after if equals else value
        if name == "--algorithm" and is_in_file(value):
            found[value] = load_user_algorithm(value)
    return found


def _broken_rules(cls: object) -> list[str]:
    """Return one sentence per reason why an object cannot be used as an algorithm."""
    base = _base_of(cls)
    if base is None:
        shown = cls.__name__ if isinstance(cls, type) else type(cls).__name__
        return [f"{shown} is no subclass of Algorithm."]
    if "__dataclass_fields__" not in vars(cls) or not cls.__dataclass_params__.frozen:
        return [
            f"{cls.__name__} is no frozen dataclass: write @dataclass(frozen=True, kw_only=True) above it."
        ]
    rules = []
    for name, method in inspect.getmembers(base, inspect.isfunction):
        own, count = inspect.getattr_static(cls, name), len(inspect.signature(method).parameters)
        if name.startswith("__") or own is method:
            continue
        if not inspect.isfunction(own):
            rules.append(f"{cls.__name__}.{name} must be a method.")
            continue
        try:
            inspect.signature(own).bind(*[None] * count)
        except TypeError as error:
            wanted = f"{name}{inspect.signature(method)}".replace("'", "")
            rules.append(f"{cls.__name__}.{name}{inspect.signature(own)}: {error}; it is called as {wanted}.")
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            rules.append(f"Field {field.name} of {cls.__name__} has no default.")
    return rules


def _base_of(cls: object) -> type | None:
    """Return the class `Algorithm` if `cls` extends it, else None. The class is found by name, because
    configurations do not import algorithms."""
    mro = cls.__mro__ if isinstance(cls, type) else ()
    named = (one for one in mro if (one.__module__, one.__name__) == ("megarl.algorithms.base", "Algorithm"))
    return next(named, None)

"""Parse the command lines of the commands that only read. Every error becomes a ConfigError with advice."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from megarl.config.errors import ConfigError, did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError, so that `megarl` prints the error and exits with 2."""

    def __init__(self, command: str, description: str, add_help: bool = True) -> None:
        super().__init__(
            f"megarl {command}",
            description=description,
            add_help=add_help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the arguments. Raises: ConfigError; SystemExit(0) after --help."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            word = next((word for word in unknown if word.startswith("-")), unknown[0])
            advice = did_you_mean(word.lstrip("-").partition("=")[0], [flag[2:] for flag in flags])
            advice = advice or f" There are {', '.join(sorted(flags))}."
            raise ConfigError([f"{word}: no such flag of {self.prog}.{advice}"])
        return arguments

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+?): (?=\()", r"\1 ", message).removeprefix("argument ")
        raise ConfigError([f"{message} See `{self.prog} --help`."])


def whole(at_least: int, example: int, at_most: float = math.inf) -> Callable[[str], int]:
    """Return a type for add_argument: whole numbers from `at_least` to `at_most`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or not at_least <= int(text) <= at_most:
            raise argparse.ArgumentTypeError(
                f"({text}): must be a whole number of {_bounds(at_least, at_most)}. Try {example}."
            )
        return int(text)

    return parse


def number(at_least: float, example: float, at_most: float = math.inf) -> Callable[[str], float]:
    """Return a type for add_argument: finite numbers from `at_least` to `at_most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (at_least <= value <= at_most and math.isfinite(value)):
            raise argparse.ArgumentTypeError(
                f"({text}): must be a number of {_bounds(at_least, at_most)}. Try {example:g}."
            )
        return value

    return parse


def _bounds(at_least: float, at_most: float) -> str:
    return f"at least {at_least:.12g}" + ("" if at_most == math.inf else f" and at most {at_most:.12g}")

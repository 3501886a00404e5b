"""The interface of reward functions, and the only place that calls one: `judge`."""

from __future__ import annotations

import math
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.invariants import LARGEST_FLOAT32

_SHOWN_CHARACTERS = 300


class RewardFunction(Protocol):
    """A reward function in verl's calling convention. It is called by keyword, with a copy of `extra_info`.

    It returns a number, or a dict with the number as `score` and, if it likes, the answer that it found in
    the response as `pred`. Other keys have no effect."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]
    ) -> float | Mapping[str, Any]: ...


class Score(float):
    """A reward with the answer that it was given for, so that `megarl eval` can count votes.

    Args:
        answer: the answer in the response, as text; "" if the response has none."""

    answer: str

    def __new__(cls, reward: float, answer: str) -> Score:
        score = super().__new__(cls, reward)
        score.answer = answer
        return score


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One response to score, with the data of its row that a reward function gets."""

    data_source: str
    solution_str: str
    """The response's text alone, without special tokens."""
    ground_truth: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    sample_id: int | None = None
    """Id of the sample, which the verdict carries and errors name."""

    @property
    def digest(self) -> int:
        """A 32-bit digest of the response's text."""
        return digest_of_text(self.solution_str)


def digest_of_text(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def judge(fn: RewardFunction, row: RewardSample) -> float:
    """Call a reward function for one response and return the reward, as a `Score` if the function says which
    answer it found.

    Raises: ValueError if the function raises (with its traceback) or does not return a finite number within
        the range of float32."""
    try:
        value = fn(
            data_source=row.data_source,
            solution_str=row.solution_str,
            ground_truth=row.ground_truth,
            extra_info=dict(row.extra_info),
        )
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        # from None: the message holds the traceback, once is enough
        raise ValueError(
            f"{describe(_name(fn), row)} raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
        ) from None
    number, answer = _number(value), getattr(value, "answer", None)
    if isinstance(value, Mapping):
        number, answer = _number(value.get("score")), value.get("pred", "" if "pred" in value else None)
    if number is None or not math.isfinite(number):
        raise ValueError(
            f"{describe(_name(fn), row)} returned {value!r} ({type(value).__name__}); wanted a "
            "finite number, e.g. 0.0 or 1.0, or a dict with one as `score`."
        )
    if abs(number) > LARGEST_FLOAT32:
        raise ValueError(
            f"{describe(_name(fn), row)} returned {number:g}, and advantages are computed in float32, which "
            f"ends at {LARGEST_FLOAT32:.2g}; wanted a smaller number, e.g. 0.0 or 1.0."
        )
    return number if answer is None else Score(number, str(answer))


def _number(value: object) -> float | None:
    """Convert bool, int, float, NumPy and torch scalars to a float; None for anything else."""
    if not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # e.g. an array of several numbers
        return None


def _name(fn: RewardFunction) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def describe(name: str, row: RewardSample) -> str:
    """Return the beginning of a message about a reward function: its name and what it was called with."""
    sample = "" if row.sample_id is None else f"sample {row.sample_id}, "
    shown = repr(row.solution_str)
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."
    return (
        f"the reward function {name} ({sample}data_source {row.data_source!r}, ground_truth "
        f"{row.ground_truth!r}, solution_str {shown})"
    )

"""What a reward function is, and how one is called: `score` is the only place that does it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

_SHOWN_CHARACTERS = 300


class RewardFunction(Protocol):
    """verl's calling convention. Called by keyword, with a copy of `extra_info`."""

    def __call__(self, data_source: str, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]) -> float: ...


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One response to judge."""

    data_source: str
    solution_str: str
    """The response's text alone, without special tokens."""
    ground_truth: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    sample_id: int | None = None
    """For errors only."""


def score(fn: RewardFunction, rows: Iterable[RewardSample]) -> list[float | None]:
    """The reward of each row, in order. None is kept for rewards that fail without ending the run (none do so yet).

    Raises: ValueError if the function raises (with its traceback) or returns NaN, an infinity or something that is not a number.
    """
    return [_score_one(fn, row) for row in rows]


def probe_reward(fn: RewardFunction, dataset: Sequence[Any], flag: str = "--train-data") -> None:
    """Calls the function before training starts, so that a broken one is found while nothing is lost yet.

    The first row of every data source is judged twice: for an empty response, and for its ground truth as the response.

    Args:
        dataset: rows with `data_source`, `ground_truth` and `extra_info` (a PromptDataset).
    Raises: ValueError as `score` does.
    """
    first_rows: dict[str, int] = {}
    for index in range(len(dataset)):
        first_rows.setdefault(dataset[index].data_source, index)
    for index in first_rows.values():
        row = dataset[index]
        for solution in dict.fromkeys(("", row.ground_truth or "")):
            try:
                score(fn, [RewardSample(row.data_source, solution, row.ground_truth, row.extra_info)])
            except ValueError as error:
                raise ValueError(f"before training, on row {index} (from 0) of {flag}: {error}") from error


def _score_one(fn: RewardFunction, row: RewardSample) -> float:
    try:
        value = fn(
            data_source=row.data_source,
            solution_str=row.solution_str,
            ground_truth=row.ground_truth,
            extra_info=dict(row.extra_info),
        )
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and the run must end with one message
        # from None: the message holds the traceback, once is enough
        raise ValueError(f"{_describe(fn, row)} raised {type(error).__name__}: {error}\n{traceback.format_exc()}") from None
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{_describe(fn, row)} returned {value!r} ({type(value).__name__}); wanted a finite number, e.g. 0.0 or 1.0.")
    return number


def _number(value: object) -> float | None:
    """bool, int, float, NumPy and torch scalars as a float; None for anything else."""
    if not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # e.g. an array of several numbers
        return None


def _describe(fn: RewardFunction, row: RewardSample) -> str:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    sample = "" if row.sample_id is None else f"sample {row.sample_id}, "
    shown = repr(row.solution_str)
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."
    return f"the reward function {name} ({sample}data_source {row.data_source!r}, ground_truth {row.ground_truth!r}, solution_str {shown})"

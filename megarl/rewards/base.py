"""Define the interface of reward functions, and `judge`, the only function that calls one."""

from __future__ import annotations

import asyncio
import functools
import inspect
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

    What an asynchronous one returns is awaited. It returns a number, or a dict with the number as `score`, or
    with several numbers by name as `scores`, whose weighted sum is the reward. The dict may hold the answer
    that it found in the response as `pred`. Other keys have no effect."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> float | Mapping[str, Any]: ...


class Score(float):
    """A reward with the answer that it was given for, so that `megarl eval` can count votes, and with the
    scores that it is the sum of.

    Args:
        answer: the answer in the response, as text; "" if the response has none, None if the function names
            no answers.
        scores: name -> unweighted score; None if the function returns a single number."""

    answer: str | None
    scores: dict[str, float] | None

    def __new__(
        cls, reward: float, answer: str | None = None, scores: dict[str, float] | None = None
    ) -> Score:
        score = super().__new__(cls, reward)
        score.answer, score.scores = answer, scores
        return score


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One response to score, with the data of its row that a reward function gets."""

    data_source: str
    solution_str: str
    """The response's text alone, without special tokens."""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    sample_id: int | None = None
    """Id of the sample, which the verdict carries and errors name."""

    @property
    def digest(self) -> int:
        """A 32-bit digest of the response's text."""
        return digest_of_text(self.solution_str)


def digest_of_text(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of asynchronous functions. It stays open between calls, as their clients may need it."""
    return asyncio.new_event_loop()


def judge(fn: RewardFunction, row: RewardSample, weights: Mapping[str, float] | None = None) -> float:
    """Call a reward function for one response and return the reward, as a `Score` if the function says which
    answer it found, or returns several scores.

    Args:
        weights: name -> weight of a score in the reward. Without weights each counts 1.
    Raises: ValueError if the function raises (with its traceback), does not return a finite number within
        the range of float32, or returns scores without a weight."""
    try:
        value = fn(
            data_source=row.data_source,
            solution_str=row.solution_str,
            ground_truth=row.ground_truth,
            extra_info=dict(row.extra_info),
        )
        if inspect.isawaitable(value):
            value = _event_loop().run_until_complete(value)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code may raise anything
        # from None: the message holds the traceback, once is enough
        raise ValueError(
            f"{describe(_name(fn), row)} raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
        ) from None
    number, answer, scores = _number(value), getattr(value, "answer", None), None
    if isinstance(value, Mapping):
        number, answer = _number(value.get("score")), value.get("pred", "" if "pred" in value else None)
        if "scores" in value:
            scores = _scores(fn, row, value, weights)
            number = sum((weights or {}).get(name, 1.0) * score for name, score in scores.items())
    if number is None or not math.isfinite(number):
        raise ValueError(
            f"{describe(_name(fn), row)} returned {value!r} ({type(value).__name__}); wanted a "
            "finite number, e.g. 0.0 or 1.0, or a dict with one as `score`."
        )
    if weights and scores is None:
        raise ValueError(
            f"{describe(_name(fn), row)} returned {value!r}, which --score-weights cannot weigh; wanted a dict "
            f"with the scores {', '.join(weights)} as `scores`. Or leave --score-weights out."
        )
    if abs(number) > LARGEST_FLOAT32:
        raise ValueError(
            f"{describe(_name(fn), row)} returned {number:g}, and advantages are computed in float32, which "
            f"ends at {LARGEST_FLOAT32:.2g}; wanted a smaller number, e.g. 0.0 or 1.0."
        )
    if answer is None and scores is None:
        return number
    return Score(number, None if answer is None else str(answer), scores)


def _scores(
    fn: RewardFunction, row: RewardSample, value: Mapping[str, Any], weights: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the scores in the dict that a reward function returned. Raises: ValueError for malformed
    scores."""
    given, who = value["scores"], f"{describe(_name(fn), row)} returned {value!r}"
    if "score" in value:
        raise ValueError(f"{who}, with both `score` and `scores`; wanted one of them.")
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f'{who}; wanted numbers by name as `scores`, e.g. {{"correct": 1.0, "short": 0.5}}.')
    scores: dict[str, float] = {}
    for name, score in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("reward"):
            raise ValueError(
                f"{who}; the name of a score must be letters, digits and underscores, and not begin with a digit "
                f"or with reward, and {name!r} does. Try correct."
            )
        number = _number(score)
        if number is None or not abs(number) <= LARGEST_FLOAT32:
            raise ValueError(f"{who}; the score {name} must be a number that is finite in float32, e.g. 1.0.")
        if weights and name not in weights:
            raise ValueError(
                f"{who}; --score-weights has no weight for {name}. Add {name}=1 to it, or {name}=0."
            )
        scores[name] = number
    return scores


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

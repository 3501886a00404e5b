"""Choose the built-in reward of each data source (--reward auto)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from megarl.rewards.base import RewardFunction, Score
from megarl.rewards.gsm8k import gsm8k_answer, gsm8k_reward
from megarl.rewards.math import math_reward


def _gsm8k(
    data_source: str, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]
) -> Score:
    return Score(gsm8k_reward(data_source, solution_str, ground_truth), gsm8k_answer(solution_str))


BUILT_IN: dict[str, RewardFunction] = {"gsm8k": _gsm8k, "math": math_reward}

# The first pattern that fits the lower-cased data source decides.
ROUTES: tuple[tuple[str, str], ...] = (
    ("*gsm8k*", "gsm8k"),
    ("megarl/sums", "gsm8k"),
    ("megarl/calc_tool", "gsm8k"),
    ("*math*", "math"),  # lighteval/MATH, HuggingFaceH4/MATH-500, math_dapo, ...
    ("*aime*", "math"),
)


def auto_reward(
    data_source: str, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]
) -> float:
    """Return the reward by the built-in rule that ROUTES has for `data_source`. Raises: ValueError if it has
    none."""
    return BUILT_IN[route(data_source)](data_source, solution_str, ground_truth, extra_info)


def route(data_source: str) -> str:
    """Return the name of the built-in reward for `data_source`, gsm8k or math. Raises: ValueError if none is
    known."""
    for pattern, name in ROUTES:
        if fnmatchcase(data_source.lower(), pattern):
            return name
    known = ", ".join(f"{pattern} -> {name}" for pattern, name in ROUTES)
    raise ValueError(
        f"--reward auto: no reward is known for data_source ({data_source!r}). Known: {known}. "
        f"Choose one with --reward {' or '.join(BUILT_IN)}, or bring your own with "
        "--reward-function path/to/file.py:function."
    )

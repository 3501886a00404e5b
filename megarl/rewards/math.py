r"""Mathematical answers, \boxed{...} or plain, judged by the math-verify library: 1/2 = 0.5 = \frac{1}{2},
(x-1)(x+1) = x^2-1."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

from megarl.rewards.base import Score

TIMEOUT_S = 5


def math_reward(
    data_source: str, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any] | None = None
) -> float:
    r"""Return 1.0 if the last mathematical answer of `solution_str` equals `ground_truth`, else 0.0.

    Parsing and each comparison get TIMEOUT_S seconds (9^{9^{9^9}} would take for ever); out of time counts as
    wrong. The timeouts are SIGALRM's, so there are none outside the main thread.

    Args:
        ground_truth: LaTeX or a number, with or without $...$ or \boxed{...}.
    Raises: ValueError if `ground_truth` cannot be parsed: no answer could ever be right.
    """
    from math_verify import parse, verify

    timeout = _timeout()
    gold = _parse_ground_truth(ground_truth)
    found = parse(solution_str, parsing_timeout=timeout)
    is_right = verify(gold, found, timeout_seconds=timeout)
    answer = next((one for one in reversed(found) if isinstance(one, str)), "")
    return Score(1.0 if is_right else 0.0, "".join(answer.split()))


# Every prompt is answered by a group of samples, and in several passes: its ground truth is parsed once.
@lru_cache(maxsize=65536)
def _parse_ground_truth(ground_truth: str | None) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    text = ground_truth if ground_truth and "\\boxed{" in ground_truth else f"\\boxed{{{ground_truth or ''}}}"
    gold = parse(text, extraction_config=[LatexExtractionConfig()], parsing_timeout=_timeout())
    if not gold:
        raise ValueError(
            f"ground_truth is {ground_truth!r}; the math reward wants a mathematical expression, "
            f'e.g. "\\frac{{1}}{{2}}".'
        )
    return gold


def _timeout() -> int | None:
    return TIMEOUT_S if threading.current_thread() is threading.main_thread() else None

"""GSM8K's rule: the number after the last "####" is the answer (arXiv:2110.14168)."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = r"-?[0-9.,]+"
_ANSWER = re.compile(f"#### ({_NUMBER})")


def gsm8k_reward(
    data_source: str, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if the last "#### n" equals `ground_truth`, as text or as a number (17 = 17.0 = 17. and
    1,234 = 1234), else 0.0.

    Raises: ValueError if `ground_truth` is not a number: no answer could ever be right.
    """
    truth = (ground_truth or "").strip()
    if not re.fullmatch(_NUMBER, truth) or not re.search("[0-9]", truth):
        raise ValueError(
            f'ground_truth is {ground_truth!r}; the gsm8k reward wants the number alone, e.g. "17" '
            '(what follows "####").'
        )
    answers = _ANSWER.findall(solution_str)
    return 1.0 if answers and _equal(_plain(answers[-1]), _plain(truth)) else 0.0


def gsm8k_answer(solution_str: str) -> str:
    """Return the number after the last "####", "" if there is none; equal numbers as one text (17 for
    017.0)."""
    answers = _ANSWER.findall(solution_str)
    return _canonical(_plain(answers[-1])) if answers else ""


def _plain(number: str) -> str:
    return number.replace(",", "").rstrip(".")


def _canonical(number: str) -> str:
    try:
        text = format(Decimal(number), "f")
    except InvalidOperation:  # e.g. "1.2.3"
        return number
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _equal(answer: str, truth: str) -> bool:
    if answer == truth:
        return True
    try:
        return Decimal(answer) == Decimal(truth)
    except InvalidOperation:  # e.g. "1.2.3"
        return False

"""Problems of the quickstart's task: chained additions and subtractions, e.g. "23-5-1 ?", answered in GSM8K's
format.

Two kinds of answer exist for the warm-up. A *worked* answer writes every step and is right; a *snap* answer
guesses near the truth and is right one time in eight. A model warmed up on few worked and many snap answers
can do the sums but seldom takes the trouble: reinforcement learning finds out that working them out pays. The
warm-up data is built for that purpose.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "test"]
DATA_SOURCE = "megarl/sums"
_LOWEST, _HIGHEST = 10, 99


@dataclass(frozen=True, slots=True)
class SumsProblem:
    """A start value and signed operands, e.g. `SumsProblem(23, (-5, -1))`; every running value lies in
    10..99."""

    start: int
    ops: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.start}" + "".join(f"{op:+d}" for op in self.ops)

    @property
    def question(self) -> str:
        return f"{self.key} ?"

    @property
    def answer(self) -> int:
        return self.start + sum(self.ops)


def is_test(key: str) -> bool:
    """Return whether a problem is held out: one key in sixteen is, by its hash.

    So the splits are disjoint whatever the seed."""
    return int(hashlib.sha1(key.encode()).hexdigest(), 16) % 16 == 0


def sums(rng: random.Random, split: Split, lo: int = 2, hi: int = 3, kmax: int = 5) -> SumsProblem:
    """Draw a problem of `split` with lo..hi operands of size 1..kmax.

    A sign is flipped where the value would leave 10..99."""
    if split not in ("train", "test") or not 1 <= lo <= hi or not 1 <= kmax <= 45:
        raise ValueError(
            f"split ({split}) must be train or test, 1 <= lo ({lo}) <= hi ({hi}), and 1 <= kmax "
            f"({kmax}) <= 45."
        )
    while True:
        num_ops = rng.randint(lo, hi)
        start = value = rng.randint(_LOWEST, _HIGHEST)
        ops = []
        for _ in range(num_ops):
            size, sign = rng.randint(1, kmax), rng.choice([1, -1])
            op = sign * size if _LOWEST <= value + sign * size <= _HIGHEST else -sign * size
            ops.append(op)
            value += op
        problem = SumsProblem(start, tuple(ops))
        if is_test(problem.key) == (split == "test"):
            return problem


def worked_answer(problem: SumsProblem) -> str:
    """Return one line per step, then the result: "23-5=18\\n18-1=17\\n#### 17"."""
    value, lines = problem.start, []
    for op in problem.ops:
        lines.append(f"{value}{op:+d}={value + op}")
        value += op
    return "\n".join([*lines, f"#### {value}"])


def snap_answer(problem: SumsProblem, rng: random.Random) -> str:
    """Return a guess that is at most four off and right one time in eight: "#### 19"."""
    return f"#### {min(99, max(0, problem.answer + rng.choice([-4, -3, -2, -1, 0, 1, 2, 3])))}"


def sums_row(problem: SumsProblem, split: Split, index: int, response: str | None = None) -> dict[str, Any]:
    """Return the problem in verl's columns (megarl/data/columns.py); `response` makes it a fine-tuning row."""
    row = {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {
            "split": split,
            "index": index,
            "key": problem.key,
            "n_ops": len(problem.ops),
            "answer": worked_answer(problem),
        },
    }
    return row if response is None else row | {"response": response}

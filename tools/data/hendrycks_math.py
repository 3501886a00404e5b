r"""Prepare MATH (Hendrycks et al., arXiv:2103.03874) from its published files.

    python tools/data/hendrycks_math.py data/train-00000-of-00001.parquet --out data/math_train.parquet

Columns: `problem`, `solution`, `level`, `type` (DigitalLearningGmbH/MATH-lighteval,
EleutherAI/hendrycks_math), or `problem`, `solution`, `answer`, `subject`, `level`, `unique_id`
(HuggingFaceH4/MATH-500). The prompt is the problem with the instruction to answer in \boxed{}. The ground
truth is `answer`, or else what is in the last \boxed{} of the solution. The solution is the response for
fine-tuning. The reward is --reward math, which --reward auto chooses."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prepare import BOXED_INSTRUCTION, LeftOut, Row, main, texts, user


def convert(row: Row) -> Row:
    problem, solution = texts(row, "problem", "solution")
    answer = row.get("answer") or last_boxed(solution)
    if not answer:
        raise LeftOut("the solution has no answer in \\boxed{}")
    about = {"level": str(row.get("level", "")), "subject": row.get("type") or row.get("subject") or ""}
    return {
        "data_source": "lighteval/MATH",
        "prompt": user(f"{problem} {BOXED_INSTRUCTION}"),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "response": solution,
        "extra_info": about,
    }


def last_boxed(solution: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...}, also without braces; None without one."""
    begin = max(solution.rfind(name) for name in ("\\boxed", "\\fbox"))
    if begin < 0:
        return None
    rest = solution[begin:].partition("boxed" if solution.startswith("\\boxed", begin) else "fbox")[2]
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip() or None  # \boxed 5$
    depth = 0
    for at, character in enumerate(rest):
        if character in "{}" and rest[at - 1 : at] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[1:at].strip() or None
    return None


if __name__ == "__main__":
    sys.exit(main(__doc__, convert))

r"""Prepare DAPO-Math-17k (BytedTsinghua-SIA/DAPO-Math-17k, arXiv:2503.14476) from its published file.

    python tools/data/dapo_math.py data/dapo-math-17k.parquet --out data/dapo_math.parquet

The columns are verl's already: `data_source` (math_dapo), `prompt`, `ability`, `reward_model`,
`extra_info`. The published file holds each of its 17 thousand problems a hundred times; each is kept
once, with its published prompt, which asks for a last line "Answer: ...". A `prompt` that is a text is
taken for the bare problem. The reward is --reward math, which --reward auto chooses."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prepare import LeftOut, Row, WrongColumns, main, user

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


class Converter:
    """Keeps each problem once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, row: Row) -> Row:
        reward_model, prompt = row.get("reward_model"), row.get("prompt")
        if not isinstance(reward_model, dict) or not isinstance(reward_model.get("ground_truth"), str):
            raise WrongColumns("wanted the columns prompt and reward_model with a ground_truth")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], dict):
            text = prompt[0].get("content")
        else:
            text = prompt
        if not isinstance(text, str):
            raise WrongColumns("wanted a prompt that is a text or a list of one message")
        problem = text.removeprefix(BEFORE).removesuffix(AFTER).strip()
        if not problem:
            raise LeftOut("the prompt is empty")
        if problem in self._seen:
            raise LeftOut("the same problem again")
        self._seen.add(problem)
        return {
            "data_source": "math_dapo",
            "prompt": user(f"{BEFORE}{problem}{AFTER}"),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": reward_model["ground_truth"]},
        }


if __name__ == "__main__":
    sys.exit(main(__doc__, Converter()))

"""Prepare UltraFeedback (arXiv:2310.01377) from its published files.

    python tools/data/ultrafeedback.py train_prefs-00000-of-00001.parquet --out data/ultrafeedback.parquet

The files are those of HuggingFaceH4/ultrafeedback_binarized (`prompt`, `prompt_id`, `chosen` and
`rejected` as lists of messages, `score_chosen`, `score_rejected`) or of openbmb/UltraFeedback (`source`,
`instruction`, `completions` with `response` and `overall_score`). The response is the chosen answer, or
the completion with the highest score. `extra_info` has the rejected one, or that with the lowest score,
and both scores. There is no ground truth: train with --reward-model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prepare import LeftOut, Row, WrongColumns, main, user


def convert(row: Row) -> Row:
    if isinstance(row.get("chosen"), list) and isinstance(row.get("rejected"), list):
        prompt, best, worst, scores = _binarized(row)
    elif isinstance(row.get("instruction"), str) and isinstance(row.get("completions"), list):
        prompt, best, worst, scores = _completions(row)
    else:
        raise WrongColumns("wanted chosen and rejected as lists of messages, or instruction and completions")
    if not best.strip():
        raise LeftOut("the best answer is empty")
    if not all(message["content"].strip() for message in prompt):
        raise LeftOut("the prompt is empty")
    return {
        "data_source": "ultrafeedback",
        "prompt": prompt,
        "ability": "alignment",
        "response": best,
        "extra_info": {"rejected": worst, "score_chosen": scores[0], "score_rejected": scores[1]},
    }


def _binarized(row: Row) -> tuple[list[dict[str, str]], str, str, tuple[float, float]]:
    *prompt, best = row["chosen"]
    if not prompt or best["role"] != "assistant":
        raise LeftOut("the chosen conversation does not end with an answer")
    scores = row.get("score_chosen"), row.get("score_rejected")
    return prompt, best["content"], row["rejected"][-1]["content"], scores


def _completions(row: Row) -> tuple[list[dict[str, str]], str, str, tuple[float, float]]:
    scored = [one for one in row["completions"] if one.get("overall_score") is not None]
    if len(scored) < 2:
        raise LeftOut("fewer than two completions have a score")
    best, worst = (choose(scored, key=lambda one: one["overall_score"]) for choose in (max, min))
    scores = best["overall_score"], worst["overall_score"]
    return user(row["instruction"]), best["response"], worst["response"], scores


if __name__ == "__main__":
    sys.exit(main(__doc__, convert))

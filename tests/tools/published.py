"""Rows with the columns and the quirks of published data sets, in words of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"content": content, "role": role}


def _dapo(problem: str, answer: str, index: str) -> dict[str, object]:
    return {
        "data_source": "math_dapo",
        "prompt": [_turn("user", DAPO_PROMPT.format(problem))],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def _completion(model: str, response: str, score: float | None) -> dict[str, object]:
    return {"model": model, "response": response, "overall_score": score, "principle": "helpfulness"}


GSM8K = [
    {
        "question": "Ann has 3 pens and buys 1,200. How many?",
        "answer": "3+1200=<<3+1200=1203>>1203\n#### 1,203",
    },
    {"question": "How many legs have 2 cats?", "answer": "2*4=<<2*4=8>>8\n#### 8"},
]
MATH = [
    {
        "problem": "Compute $\\frac{1}{4}+\\frac{1}{4}$.",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": "It is $\\boxed{1}{2}$ at first, and then $\\boxed{\\frac{1}{2}}$.",
    },
    {"problem": "$2+3$?", "level": "Level 1", "type": "Algebra", "solution": "Thus $\\boxed 5$."},
    {"problem": "Find $\\{x\\}$.", "level": "Level ?", "type": "Algebra", "solution": "\\fbox{\\{1\\}}"},
    {"problem": "Prove it.", "level": "Level 5", "type": "Geometry", "solution": "Clear."},
]
MATH_500 = [
    {
        "problem": "Convert $(0,3)$.",
        "solution": "So $\\boxed{(3,\\pi/2)}$.",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    }
]
DAPO = [_dapo("What is 1+1?", "2", "a"), _dapo("What is 5*5?", "25", "b")] * 3
HH_RLHF = [
    {
        "chosen": "\n\nHuman: How do I bake?\n\nAssistant: What?\n\nHuman: Bread: how?\n\nAssistant: Flour.",
        "rejected": "\n\nHuman: How do I bake?\n\nAssistant: What?\n\nHuman: Bread: how?\n\nAssistant: No.",
    },
    {
        "chosen": "\n\nHuman: Hi\n\nHuman: Are you there?\n\nAssistant: Yes.",
        "rejected": "\n\nHuman: Hello\n\nAssistant: No.",
    },
    {"chosen": "\n\nHuman: Hi\n\nAssistant:", "rejected": "\n\nHuman: Hi\n\nAssistant: Yo"},
]
ULTRAFEEDBACK_BINARIZED = [
    {
        "prompt": "Name a tree.",
        "prompt_id": "0af3",
        "chosen": [_turn("user", "Name a tree."), _turn("assistant", "Oak.")],
        "rejected": [_turn("user", "Name a tree."), _turn("assistant", "Cat.")],
        "messages": [_turn("user", "Name a tree."), _turn("assistant", "Oak.")],
        "score_chosen": 8.5,
        "score_rejected": 2.0,
    },
    {
        "prompt": "Say nothing.",
        "prompt_id": "0af4",
        "chosen": [_turn("user", "Say nothing."), _turn("assistant", "")],
        "rejected": [_turn("user", "Say nothing."), _turn("assistant", "No.")],
        "messages": [_turn("user", "Say nothing."), _turn("assistant", "")],
        "score_chosen": 5.0,
        "score_rejected": 1.0,
    },
]
ULTRAFEEDBACK = [
    {
        "source": "evol_instruct",
        "instruction": "Name a tree.",
        "models": ["a", "b", "c"],
        "completions": [
            _completion("a", "Cat.", 2.0),
            _completion("b", "Oak.", 8.5),
            _completion("c", "?", None),
        ],
        "correct_answers": ["None"],
        "incorrect_answers": ["None"],
    }
]
FILES = {
    "gsm8k/train-00000-of-00001.parquet": GSM8K,
    "math/train-00000-of-00001.parquet": MATH,
    "math-500/test.jsonl": MATH_500,
    "dapo-math-17k.parquet": DAPO,
    "hh-rlhf/helpful-base/train.jsonl": HH_RLHF,
    "ultrafeedback_binarized/train_prefs-00000-of-00001.parquet": ULTRAFEEDBACK_BINARIZED,
    "ultrafeedback/evol_instruct.jsonl": ULTRAFEEDBACK,
}


def write_published(folder: Path) -> None:
    """Write every data set as its publisher does, as parquet or JSON lines."""
    for name, rows in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

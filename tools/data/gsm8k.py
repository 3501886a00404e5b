"""Prepare GSM8K (openai/gsm8k) from its published files: columns `question` and `answer`.

    python tools/data/gsm8k.py main/train-00000-of-00001.parquet --out data/gsm8k_train.parquet

The rows are those that megarl makes of the published files when --train-data names them: the question
with the instruction to answer behind "####", the number behind "####" as the ground truth, and the worked
answer as the response for fine-tuning. The reward is --reward gsm8k, which --reward auto chooses."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prepare import LeftOut, Row, main, texts

from megarl.data.columns import parse_row


def convert(row: Row) -> Row:
    question, answer = texts(row, "question", "answer")
    parsed, _ = parse_row({"question": question, "answer": answer}, "prompt", None)
    if parsed.ground_truth is None:
        raise LeftOut('the answer has no "####"')
    return {
        "data_source": parsed.data_source,
        "prompt": list(parsed.messages),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": parsed.ground_truth},
        "response": parsed.response and parsed.response["content"],
        "extra_info": parsed.extra_info,
    }


if __name__ == "__main__":
    sys.exit(main(__doc__, convert))

"""An environment of several turns: the model may use a calculator that does one step at a time.

    473+288-91 ?  ->  473+288  ->  761  ->  761-91  ->  670  ->  #### 670
    user              model        tool     model       tool     model

`python examples/calculator_env.py runs/calculator/data` writes the data files and the model's folder of
docs/agents.md. The numbers are too long for so small a model to add them up in its head."""

from __future__ import annotations

import json
import random
import re
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

NUM_TRAIN_ROWS, NUM_TEST_ROWS = 4096, 200
NUM_WARMUP_ROWS, NUM_MIXED_ROWS = 30_720, 2560
TOOL_SHARE = 0.3
"""Share of the problems of the second warm-up that are solved with the calculator."""


class Calculator:
    """Works out a+b and a-b, and judges the final answer, "#### n". Everything else is an error."""

    def reset(self, row):
        self.truth = row["reward_model"]["ground_truth"]
        return row["prompt"]

    def step(self, text):
        if "####" in text:
            return [], float(text.split("####")[-1].strip() == self.truth), True
        found = re.fullmatch(r"(\d{1,9})([+-]\d{1,9})", text.strip())
        result = int(found[1]) + int(found[2]) if found else "error"
        return [{"role": "tool", "content": str(result)}], None, False


def solution(rng: random.Random, split: str) -> list[dict[str, str]]:
    """Return the messages of a problem and its solution. All values have three digits."""
    while True:
        value = rng.randint(100, 999)
        key, messages = str(value), []
        for _ in range(rng.randint(2, 3)):
            operand = rng.randint(10, 99) * rng.choice([1, -1])
            operand = operand if 100 <= value + operand <= 999 else -operand
            call, value = f"{value}{operand:+d}", value + operand
            messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": str(value)}]
            key += f"{operand:+d}"
        if (zlib.crc32(key.encode()) % 16 == 0) == (split == "test"):
            question = {"role": "user", "content": f"{key} ?"}
            return [question, *messages, {"role": "assistant", "content": f"#### {value}"}]


def rows(seed: int, split: str, count: int) -> list[dict]:
    """Return rows with a question and the right answer."""
    rng, found = random.Random(f"{seed}/{split}"), []
    for index in range(count):
        question, *_, answer = solution(rng, split)
        truth = answer["content"].removeprefix("#### ")
        found.append(
            {
                "data_source": "megarl/calc_tool",
                "prompt": [question],
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": index},
            }
        )
    return found


def warmup_rows(seed: int, count: int, tool_share: float) -> list[dict]:
    """Return rows for fine-tuning, one per answer of the model. Of the problems that are not solved with the
    calculator the answer is guessed."""
    rng, found = random.Random(f"{seed}/warmup/{tool_share}"), []
    while len(found) < count:
        messages = solution(rng, "train")
        if rng.random() >= tool_share:
            guess = int(messages[-1]["content"].removeprefix("#### ")) + rng.randint(-4, 3)
            guess = min(999, max(0, guess))
            messages = [messages[0], {"role": "assistant", "content": f"#### {guess}"}]
        found += [
            {"messages": messages[: at + 1]}
            for at, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    rng.shuffle(found)
    return found[:count]


def write(path: Path, lines: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_calculator(out: Path, seed: int = 0) -> None:
    """Write the data files and the model's folder. The test rows do not depend on the seed."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from sums.model import write_model_folder

    out.mkdir(parents=True, exist_ok=True)
    write(out / "train.jsonl", rows(seed, "train", NUM_TRAIN_ROWS))
    write(out / "test.jsonl", rows(0, "test", NUM_TEST_ROWS))
    write(out / "sft_tool.jsonl", warmup_rows(seed, NUM_WARMUP_ROWS, tool_share=1.0))
    write(out / "sft_mixed.jsonl", warmup_rows(seed, NUM_MIXED_ROWS, TOOL_SHARE))
    write_model_folder(out / "model", seed)


if __name__ == "__main__":
    make_calculator(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)

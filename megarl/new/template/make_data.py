"""Write the rows of the task: a word of 3 to 5 letters, which the model has to spell backwards.

    python make_data.py

    data/sft.jsonl      questions with answers, for a first round of supervised fine-tuning
    data/train.jsonl    questions with the right answer for the reward; GRPO trains on them
    data/test.jsonl     the same, for evaluation; no word of the other files is in it

Your own task: replace `draw_word`, `question`, `right_answer` and `example_answer`.
"""

import json
import random
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
NUM_ROWS = {"sft": 30720, "train": 2048, "test": 200}  # sft: 480 steps of 64 rows, each row once
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_word(rng):
    return "".join(rng.choices(LETTERS, k=rng.randint(3, 5)))


def question(word):
    return f"Reverse {word}"


def right_answer(word):
    return word[::-1]


def example_answer(rng, word):
    """Return an answer as supervised fine-tuning sees it. One in three is careless and repeats the word.

    Real examples are not all good either. Reinforcement learning then finds out which kind pays."""
    return word if rng.random() < 1 / 3 else right_answer(word)


def make_row(rng, word, has_response):
    """Return a row. The reward gets `ground_truth`; supervised fine-tuning learns `response`."""
    row = {
        "prompt": [{"role": "user", "content": question(word)}],
        "reward_model": {"ground_truth": right_answer(word)},
    }
    if has_response:
        row["response"] = example_answer(rng, word)
    return row


def main():
    rng = random.Random(0)
    words = {}  # a dict keeps its order, so that the same seed writes the same files
    while len(words) < sum(NUM_ROWS.values()):  # every word once, so that no file has a word of another
        words[draw_word(rng)] = None
    words = list(words)
    DATA.mkdir(exist_ok=True)
    for name, num_rows in NUM_ROWS.items():
        rows = [make_row(rng, words.pop(), has_response=name == "sft") for _ in range(num_rows)]
        path = DATA / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path.relative_to(DATA.parent)}: {num_rows} rows")


if __name__ == "__main__":
    main()

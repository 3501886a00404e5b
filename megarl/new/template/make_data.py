"""Write the rows of the task: a word of 3 to 6 letters, which the model has to spell backwards.

    python make_data.py

    data/sft.jsonl      questions with answers, for a first round of supervised fine-tuning
    data/train.jsonl    questions with the right answer for the reward; GRPO trains on them
    data/test.jsonl     the same, for evaluation; no row of the other files is in it

Your own task: replace `draw_word`, `question` and `answer`.
"""

import json
import random
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
NUM_ROWS = {"sft": 6400, "train": 2048, "test": 200}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_word(rng):
    return "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))


def question(word):
    return f"Reverse {word}"


def answer(word):
    return word[::-1]


def row(word, with_response):
    """Return a row. `reward` gets `ground_truth`; supervised fine-tuning learns `response`."""
    row = {
        "prompt": [{"role": "user", "content": question(word)}],
        "reward_model": {"ground_truth": answer(word)},
    }
    return row | {"response": answer(word)} if with_response else row


def main():
    rng = random.Random(0)
    words = set()
    while len(words) < sum(NUM_ROWS.values()):  # every word once, so that no file has a row of another
        words.add(draw_word(rng))
    words = sorted(words)
    rng.shuffle(words)
    DATA.mkdir(exist_ok=True)
    for name, num_rows in NUM_ROWS.items():
        rows = [row(words.pop(), with_response=name == "sft") for _ in range(num_rows)]
        path = DATA / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path.relative_to(DATA.parent)}: {num_rows} rows")


if __name__ == "__main__":
    main()

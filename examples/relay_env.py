"""A game for two policies that neither can win alone: one sees a number, the other has to say it.

    47 ?  ->  (hint)        hint ?  ->  47
    user      actor         user        actor_2

The second actor sees the first two characters of what the first one wrote, and nothing else. Both have the same
reward, 1 for the right number. `python examples/relay_env.py runs/relay/data` writes the data files and the model's
folder of docs/agents.md."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

NUMBERS = range(10, 100)
NUM_WARMUP_ROWS = 15_360
COPIED_SHARE = 0.25
"""Share of the rows of the warm-up whose answer is the number in the question. The others' answer is 10."""


class Relay:
    """Passes the first actor's hint on to the second, and judges the second's answer."""

    def reset(self, row):
        self.truth, self.next_actor = row["reward_model"]["ground_truth"], "actor"
        return row["prompt"]

    def step(self, text):
        if self.next_actor == "actor":
            self.next_actor = "actor_2"
            return [{"role": "user", "content": f"{text.strip()[:2]} ?"}], None, False
        return [], float(text.strip() == self.truth), True


def row(number: int) -> dict:
    return {
        "data_source": "megarl/relay",
        "prompt": [{"role": "user", "content": f"{number} ?"}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
    }


def warmup_rows(seed: int) -> list[dict]:
    """Return rows for fine-tuning: a number as question, and mostly 10 as answer. What is left is a model that
    could repeat a number, but seldom does."""
    rng, found = random.Random(f"{seed}/warmup"), []
    for _ in range(NUM_WARMUP_ROWS):
        number = rng.choice(NUMBERS)
        answer = number if rng.random() < COPIED_SHARE else NUMBERS[0]
        found.append(row(number) | {"response": str(answer)})
    return found


def write(path: Path, lines: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_relay(out: Path, seed: int = 0) -> None:
    """Write the data files and the model's folder. The game's rows, one per number, do not depend on the seed."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from sums.model import write_model_folder

    out.mkdir(parents=True, exist_ok=True)
    write(out / "numbers.jsonl", map(row, NUMBERS))
    write(out / "sft.jsonl", warmup_rows(seed))
    write_model_folder(out / "model", seed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the relay's rows and its untrained model.")
    parser.add_argument("out", type=Path, help="folder for numbers.jsonl, sft.jsonl and model/")
    parser.add_argument("--seed", type=int, default=0, help="of the warm-up's rows and the model's weights")
    arguments = parser.parse_args()
    make_relay(arguments.out, arguments.seed)
    print(f"numbers.jsonl, sft.jsonl and model/ are in {arguments.out}")


if __name__ == "__main__":
    main()

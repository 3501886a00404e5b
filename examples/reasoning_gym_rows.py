"""Write rows of a task of reasoning-gym for --env reasoning-gym:TASK.

    path/to/venv/bin/python examples/reasoning_gym_rows.py leg_counting train.jsonl --seed 0 --size 1000

It needs reasoning-gym, and nothing of megarl. Give the held-out rows another seed."""

from __future__ import annotations

import argparse
import json

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--config", type=json.loads, default={}, help="parameters of the task, as JSON")
    parser.add_argument("--system", choices=["none", *SYSTEM_PROMPTS], default="none")
    given = parser.parse_args()
    before = [] if given.system == "none" else [{"role": "system", "content": SYSTEM_PROMPTS[given.system]}]
    dataset = reasoning_gym.create_dataset(given.task, seed=given.seed, size=given.size, **given.config)
    with open(given.out, "w", encoding="utf-8") as file:
        for index, entry in enumerate(dataset):
            row = {
                "data_source": given.task,
                "prompt": [*before, {"role": "user", "content": entry["question"]}],
                "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
                "extra_info": {
                    "index": index,
                    "seed": given.seed,
                    "size": given.size,
                    "config": given.config,
                },
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

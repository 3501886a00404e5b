"""The commands that a job names at its end. `pytest tests/trainer/test_next_commands.py`"""

from __future__ import annotations

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.trainer.next_commands import next_commands

NEEDED = "--algorithm grpo --model m --train-data d.jsonl --train-iters 9 --save runs/a".split()


def test_the_chat_is_about_what_was_trained():
    def chat(*flags: str) -> str:
        return next_commands(load_config([*NEEDED, *flags], REGISTRY)).split("    ")[-1]

    assert chat() == "megarl chat --model runs/a"
    env = ("--env", "a=my env.py:A", "b=b.py:B", "--env-python", "b=venv/bin/python")
    assert chat(*env) == (
        "megarl chat --model runs/a --env 'a=my env.py:A' b=b.py:B --env-python b=venv/bin/python"
    )

"""The game of test_agents_job.py, which an environment class, agents and a taskset of verifiers play.

An untrained model gets different rewards in it. It may answer with a special token, whose text a tool parser gets and
others do not, as in vLLM: the game does not count it. Imports nothing but the standard library."""

import re

SPECIAL = re.compile(r"<\|?\w+\|?>")


def reward_of(text: str) -> float:
    """Return the reward of an answer: its share of lower-case letters."""
    return sum(c.islower() for c in SPECIAL.sub("", text)) / 20


def reply_to(text: str) -> str | None:
    """Return what follows an answer; None after one without any digit, which ends the game."""
    text = SPECIAL.sub("", text)
    return f"{len(text)} characters, é" if any(c.isdigit() for c in text) else None


class Letters:
    """The game as an environment class."""

    def reset(self, row):
        return row["prompt"]

    def step(self, text):
        reply = reply_to(text)
        return [] if reply is None else [{"role": "tool", "content": reply}], reward_of(text), reply is None

"""Reward a response by chance, as controls that should learn nothing: `permuted` gives it the reward of a
response of its group that chance chooses, `coin` 1 in one of four calls, `by_text` a number that the text
determines.

`permuted` is for algorithms that compare the samples of a group. Others learn from it which prompts are easy, and
most responses to these are right.

    MEGARL_PERMUTED=folder megarl train ... --num-samples-per-prompt 8 --reward-num-workers 8 \\
        --nproc-per-node 1 --reward-function tools/benchmarks/permuted_reward.py:permuted

A reward function sees one response. So the calls for a group, one in each process, leave their rewards in a
folder and wait until there are eight. A prompt may be seen once only; the folder must be new. Held-out
answers keep their rewards."""

from __future__ import annotations

import os
import random
import time
import uuid
from pathlib import Path
from typing import Any

from megarl.rewards.base import digest_of_text
from megarl.rewards.routing import auto_reward

FOLDER = "MEGARL_PERMUTED"
GROUP = 8
_PROBE_S, _WAIT_S = 1.0, 40.0
_LOOK_S = 0.002


def coin(data_source: str, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]) -> float:
    """Return 1 with a probability of a quarter, else 0; for a held-out answer its own reward."""
    if extra_info["split"] == "test":
        return float(auto_reward(data_source, solution_str, ground_truth, extra_info))
    return float(random.SystemRandom().random() < 0.25)


def by_text(
    data_source: str, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]
) -> float:
    """Return a number in [0, 1) that depends on the text alone, so that the rewards of a group differ."""
    return digest_of_text(solution_str) / 2**32


def permuted(
    data_source: str, solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]
) -> float:
    """Return the reward that the group's permutation has for this response.

    Raises: ValueError if the rest of the group does not come."""
    own = float(auto_reward(data_source, solution_str, ground_truth, extra_info))
    if extra_info["split"] == "test":
        return own
    folder = Path(os.environ[FOLDER]) / str(extra_info["index"])
    folder.mkdir(parents=True, exist_ok=True)
    # Sorted by text, so that the order in which the calls come does not matter.
    name = f"{digest_of_text(solution_str)}_{own}_{uuid.uuid4().hex}"
    (folder / name).touch()
    is_probe = solution_str in ("", ground_truth)  # what a job tries before training, alone
    deadline = time.monotonic() + (_PROBE_S if is_probe else _WAIT_S)
    while len(names := sorted(os.listdir(folder))) < GROUP:
        if time.monotonic() > deadline:
            (folder / name).unlink()
            if is_probe:
                return own
            raise ValueError(f"{len(names)} of a group of {GROUP} came; wanted --reward-num-workers {GROUP}.")
        time.sleep(_LOOK_S)
    rewards = [float(other.split("_")[1]) for other in names]
    random.Random(extra_info["index"]).shuffle(rewards)
    return rewards[names.index(name)]

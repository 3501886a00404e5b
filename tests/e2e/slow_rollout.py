"""`megarl train` with an engine that takes its time: `python -P -m slow_rollout SECONDS_PER_STEP FOLDER
train-flags...`, the driver and, of the same file, its ranks. FOLDER/rank_0, FOLDER/rank_1: a byte per step of
the engine. The first steps take no more time than they need."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

QUICK_STEPS = 28
"""Fewer than two rollouts of 16 tokens."""


def rank_main(seconds: str, folder: str, *argv: str) -> int:
    from megarl.rollout.environment import prepare_environment
    from megarl.train import main

    prepare_environment()
    from vllm.v1.engine.llm_engine import LLMEngine

    original, steps = LLMEngine.step, open(Path(folder) / f"rank_{os.environ['RANK']}", "ab", buffering=0)

    def step(self):
        steps.write(b".")
        if steps.tell() > QUICK_STEPS:
            time.sleep(float(seconds))
        return original(self)

    LLMEngine.step = step
    return main(list(argv))


def driver_main(seconds: str, folder: str, *argv: str) -> int:
    from megarl.algorithms import REGISTRY
    from megarl.config.loader import load_config
    from megarl.trainer.__main__ import train_job
    from megarl.trainer.launch import launch

    config = load_config(list(argv), REGISTRY)
    return launch(config, [seconds, folder, *argv], train_job, "slow_rollout")


if __name__ == "__main__":
    sys.exit((rank_main if "RANK" in os.environ else driver_main)(*sys.argv[1:]))

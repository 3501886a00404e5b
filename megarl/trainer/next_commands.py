"""Word the last lines of a training job: where the model is, and which commands to run next."""

from __future__ import annotations

import shlex
from pathlib import Path

from megarl.algorithms.base import algorithm_of
from megarl.config.environments import flags_of_environments
from megarl.config.schema import TrainConfig


def next_commands(config: TrainConfig) -> str:
    """Return three lines for the end of a job: the exported model, and the commands to look at the run.

    A job of supervised fine-tuning has no samples to show."""
    folder, needs_rollout = Path(config.run.save), algorithm_of(config).needs_rollout
    run, model = shlex.quote(str(folder)), shlex.quote(str(folder / "hf"))
    if algorithm_of(config).trains_scores:
        return (
            f"The reward model is in {model}. To look at the run:\n  megarl plot {run}\n"
            f"To train with it: --reward-model {model}"
        )
    plays = [shlex.join(flags_of_environments(config.episodes))] if config.episodes.env else []
    looks = [f"megarl plot {run}", " ".join([f"megarl chat --model {run}", *plays])]
    if needs_rollout:
        looks.insert(0, f"megarl show {run}")
    lines = [f"The model is in {model}. To look at the run:", f"  {'    '.join(looks)}"]
    if config.data.eval_data and needs_rollout:
        lines.append(f"  megarl eval --model {run}")
    return "\n".join(lines)

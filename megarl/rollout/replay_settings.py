"""List the settings that a replay must have in common with the run that it repeats."""

from __future__ import annotations

from pathlib import Path

from megarl.config.flags import section_flags
from megarl.config.render import write_args
from megarl.config.roles import configs_of_actors
from megarl.config.schema import CheckpointConfig, ProfileConfig, RunConfig, TrainConfig

SIZE_OF = "bytes of "
"""Beginning of the name of a setting that is the size of a data file."""
_OF_RUN = {"eval_interval", "eval_num_prompts", "eval_num_samples", "on_nonfinite"}
"""Fields of RunConfig that a replay must share with its run, because they change tokens or weights."""
FREE = {
    *(f"--{flag.name}" for flag in section_flags("", RunConfig) if flag.field not in _OF_RUN),
    *(f"--{flag.name}" for cls in (CheckpointConfig, ProfileConfig) for flag in section_flags("", cls)),
    *("--replay", "--executor", "--nproc-per-node", "--nnodes", "--call-timeout-s", "--reward-num-workers"),
}
"""Flags whose values may differ between a run and its replay."""


def replay_settings(config: TrainConfig, world_size: int) -> dict[str, str]:
    """Return name -> value of everything that a run and its replay must have in common: the flags that change
    what is computed, the number of ranks, and the sizes of the data files of all actors."""
    settings = {"ranks": str(world_size)}
    for line in write_args(config).splitlines():
        name, _, value = line.partition(" ")
        if name.startswith("--no-") and not value:
            name, value = name.replace("--no-", "--", 1), "off"
        if name.startswith("--") and name not in FREE:
            settings[name] = value or "on"
    for of_actor in configs_of_actors(config).values():
        for path in (*of_actor.data.train_data, *of_actor.data.eval_data, *of_actor.sft.sft_data):
            if Path(path).is_file():
                settings[f"{SIZE_OF}{path}"] = str(Path(path).stat().st_size)
    return settings

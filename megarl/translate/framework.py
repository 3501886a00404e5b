"""Define the frameworks whose configurations are translated, and what is read of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.config.errors import ConfigError
from megarl.frameworks import slime, trl, verl
from megarl.frameworks.rows import Row


class Framework(NamedTuple):
    """A framework whose settings can be translated.

    Args:
        marks: settings of which at least one is in every configuration of this framework."""

    name: str
    table: tuple[Row, ...]
    marks: frozenset[str]


VERL = Framework("verl", verl.TABLE, frozenset())
TRL = Framework(
    "TRL",
    trl.TABLE,
    frozenset(
        "num_generations max_completion_length reward_funcs num_iterations steps_per_generation "
        "generation_batch_size epsilon epsilon_high scale_rewards importance_sampling_level use_vllm "
        "vllm_mode mask_truncated_completions".split()
    ),
)
TRL_TRAINING = frozenset(
    "per_device_train_batch_size gradient_accumulation_steps num_train_epochs learning_rate max_steps".split()
)
"""Settings of every trainer of TRL, SFT and DPO among them."""
NO_RL_SECTION = "has settings of verl, but none of actor_rollout_ref or algorithm"
NO_GRPO_SETTING = "has settings of a trainer of TRL, but none that only GRPO has, such as num_generations"
SLIME = Framework(
    "slime",
    slime.TABLE,
    frozenset("rollout-batch-size n-samples-per-prompt hf-checkpoint num-rollout".split()),
)


@dataclass
class Source:
    """The settings that a file or a command line of another framework gives.

    Args:
        settings: name there -> value.
        unknown: name there -> why its value is not known.
        remarks: about the whole file."""

    framework: Framework
    settings: dict[str, object]
    unknown: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def nothing_found(place: str, what: str) -> ConfigError:
    return ConfigError(
        [
            f"{place}: has no {what}. Name a file with verl's settings, TRL's GRPOConfig or slime's "
            "arguments, or give the words: megarl translate -- data.train_batch_size=128"
        ]
    )


def not_rl(place: str, reason: str) -> ConfigError:
    return ConfigError(
        [
            f"{place}: {reason}, so it is a configuration of SFT, DPO or the like. Only those of "
            "reinforcement learning are translated. Write its args file with --algorithm sft or "
            "--algorithm dpo (docs/algorithms.md)."
        ]
    )

"""Build a configuration in Python, with the names of the flags."""

from __future__ import annotations

import shlex

from megarl.algorithms import REGISTRY
from megarl.config import loader
from megarl.config.flags import flag_name, format_flag
from megarl.config.roles import DeviceMap
from megarl.config.schema import TrainConfig


def load_config(*argv: str, device_map: DeviceMap | None = None, **flags: object) -> TrainConfig:
    """Return the configuration of the command line `megarl train argv`, with more flags as keywords.

    A keyword is the flag with underscores. train_iters=5 is --train-iters 5, bf16=True is --bf16,
    eval_data=["a.jsonl", "b.jsonl"] is --eval-data a.jsonl b.jsonl, kl_target=None is --kl-target none,
    actor_2_seed=1 is --actor-2-seed 1.

    Example:
        config = megarl.load_config("@configs/quickstart_ppo.args", device_map=DeviceMap(actor=[0],
        rollout=[0], critic=[1]), train_iters=5)
    Raises: ConfigError that lists all errors.
    """
    words = [word for name, value in flags.items() for word in _words(flag_name(name), value)]
    return loader.load_config(
        [*argv, *words, *(device_map.flags() if device_map else ())], REGISTRY, prog="megarl.load_config"
    )


def _words(flag: str, value: object) -> list[str]:
    """Return the words of the command line for a flag with this value.

    A value that looks like a flag or a file stays a value."""
    head, *values = shlex.split(format_flag(flag, str(value) if hasattr(value, "__fspath__") else value))
    return [f"{head}={values[0]}"] if len(values) == 1 else [head, *values]

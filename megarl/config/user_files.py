"""Record the Python files of the user's that a job runs, and name those that have changed at a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megarl.config.environments import environments
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.config.user_algorithm import is_in_file
from megarl.files.checkpoints import file_digest


def user_files(config: TrainConfig) -> dict[str, dict[str, str]]:
    """Return flag -> the path and SHA-256 of the user's file that it names, for all actors. A flag of a
    further actor is followed by the actor's suffix. A file that cannot be read is left out."""
    found = {}
    for suffix, of_actor in configs_of_actors(config).items():
        values = {
            "algorithm": getattr(type(of_actor.algorithm), "name", ""),
            "advantage": getattr(of_actor.algorithm, "advantage", None),
            "policy-loss": getattr(of_actor.algorithm, "policy_loss", ""),
            "reward-function": of_actor.data.reward_function,
        }
        of_flag = {flag + suffix: value for flag, value in values.items()}
        for spec in environments(of_actor.episodes):
            of_flag[f"env{suffix}" + (f" {spec.name}=" if spec.name is not None else "")] = spec.target
        for flag, value in of_flag.items():
            path = value.rpartition(":")[0] if value and is_in_file(value) else ""
            if os.path.isfile(path):
                found[flag] = {"path": path, "sha256": file_digest(path)}
    return found


def changed_files(config: TrainConfig, saved: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a note for each of the user's files that is not the one with which a checkpoint was made.

    Args:
        saved: `user_files` of the checkpoint's job. A file that only one of the two jobs has is not
            compared."""
    now = user_files(config)
    return [
        f"--{flag} ({now[flag]['path']}): the file has changed since the checkpoint was made, so the run goes on with "
        f"other code (SHA-256 {then['sha256'][:12]} then, {now[flag]['sha256'][:12]} now)"
        for flag, then in saved.items()
        if flag in now and then["sha256"] != now[flag]["sha256"]
    ]

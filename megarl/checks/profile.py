"""Check that this machine can make the profile that --profile asks for."""

from __future__ import annotations

from pathlib import Path

from megarl.checks.machine import Machine
from megarl.config.errors import Errors
from megarl.config.rules_files import free_name
from megarl.config.schema import TrainConfig
from megarl.files.writing import obstacle


def profile_errors(config: TrainConfig, machine: Machine) -> Errors:
    """Yield an error for Nsight Systems on a machine without GPUs, and for a folder that takes no files."""
    if config.profile.profile is None:
        return
    if config.profile.profile == "nsys" and not machine.has_gpu:
        yield "--profile (nsys): Nsight Systems records GPUs, and this machine has none. Try --profile torch."
    folder = Path(config.run.save) / "profile"
    is_own = folder.exists() or folder.is_symlink()  # otherwise the rule of --save reports it
    if machine.is_this and is_own and (why := obstacle(folder)) is not None:
        yield (
            f"--profile ({config.profile.profile}): writes its files to {folder}, which cannot be written: "
            f"{why}. Try --save {free_name(Path(config.run.save))}."
        )

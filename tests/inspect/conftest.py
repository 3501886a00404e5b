from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.schema import BatchConfig, DataConfig, ModelConfig, RunConfig, TrainConfig
from megarl.loggers.console import Progress
from megarl.trainer.run_folder import Run


@pytest.fixture
def open_run() -> Callable[..., Run]:
    """open_run(folder, "--load runs/a") -> the product's own writer of a new run folder."""

    def open_new(folder: Path, arguments: str = "--train-iters 3") -> Run:
        config = TrainConfig(
            algorithm=None,
            model=ModelConfig(model="none"),
            batch=BatchConfig(train_iters=3),
            data=DataConfig(train_data=("none",)),
            run=RunConfig(save=str(folder), log_with=()),
        )
        return Run(config, f"{arguments}\n", Progress(3, io.StringIO()))

    return open_new


@pytest.fixture
def megarl(capsys) -> Callable[..., tuple[int, str, str]]:
    """megarl("show", folder) -> exit code, stdout and stderr of the command."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        return cli.main([str(argument) for argument in arguments]), *capsys.readouterr()

    return run

"""What `megarl check` says of --profile on this machine.

pytest tests/checks/test_profile.py"""

from __future__ import annotations

import pytest

from megarl.algorithms import REGISTRY
from megarl.checks.machine import Machine
from megarl.checks.profile import profile_errors
from megarl.config.loader import load_config
from tests.config.conftest import job, write_model  # noqa: F401

CPU, GPU = Machine(None), Machine(None, has_gpu=True)


@pytest.fixture
def errors(job, tmp_path):  # noqa: F811
    """errors(machine, "--profile torch") of a job whose run folder is tmp_path/run."""

    def find(machine: Machine, flags: str) -> list[str]:
        config = load_config([job, "--save", str(tmp_path / "run"), *flags.split()], REGISTRY)
        return list(profile_errors(config, machine))

    return find


def test_nsight_systems_needs_a_gpu(errors):
    told = "--profile (nsys): Nsight Systems records GPUs, and this machine has none. Try --profile torch."
    assert errors(CPU, "--profile nsys") == [told]
    assert errors(GPU, "--profile nsys") == errors(CPU, "--profile torch") == errors(CPU, "") == []
    assert errors(CPU, "--profile memory") == errors(GPU, "--profile memory") == []


def test_a_folder_that_takes_no_files_is_found(errors, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file")
    (told,) = errors(CPU, "--profile torch")
    assert told == (
        f"--profile (torch): writes its files to {tmp_path}/run/profile, which cannot be written: "
        f"{tmp_path}/run/profile is a file. Try --save {tmp_path}/run-2."
    )
    assert errors(Machine(None, is_this=False), "--profile torch") == errors(CPU, "") == []
    (tmp_path / "run" / "profile").unlink()
    (tmp_path / "run" / "profile").mkdir()
    assert errors(CPU, "--profile torch") == []

"""What the ranks of run_checkpoints.py wrote, for all tests here: one torchrun job with two ranks, about 20
s."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import torchrun
from tests.shared import made_once


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """The folder with models, checkpoints and reports."""

    def make(out: Path) -> str:
        torchrun(2, Path(__file__).with_name("run_checkpoints.py"), out, timeout=240, folder=out)
        return str(out)

    return Path(made_once(tmp_path_factory, "checkpoints", make))


@pytest.fixture(scope="session")
def reports(saved: Path) -> list[dict]:
    return [json.loads((saved / f"report_{rank}.json").read_text()) for rank in (0, 1)]

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.jobs import LAYOUTS, Job, train
from tests.shared import made_once


@pytest.fixture(scope="session")
def layout_job(sums_data, tmp_path_factory) -> Callable[[str], Job]:
    """layout_job("tp2_to_tp2") -> three steps in this layout of LAYOUTS; run once, by the first test that
    asks for it."""
    more = (
        "--save-interval",
        "2",
        "--eval-data",
        str(sums_data / "test.parquet"),
        "--eval-interval",
        "3",
        "--eval-num-prompts",
        "20",
    )

    @functools.cache
    def run(name: str) -> Job:
        def make(folder: Path) -> tuple[int, str, str]:
            flags = more if name == "dp2_to_tp1" else ()
            job = train(sums_data, folder / "run", *LAYOUTS[name], *flags)
            return job.returncode, job.output, str(job.folder)

        code, output, folder = made_once(tmp_path_factory, f"layout_{name}", make)
        return Job(code, output, Path(folder))

    return run

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.e2e.jobs import LAYOUTS, Job, train


@pytest.fixture(scope="session")
def layout_job(sums_data, tmp_path_factory) -> Callable[[str], Job]:
    """layout_job("tp2_to_tp2") -> three steps in this layout of LAYOUTS; run once, by the first test that
    asks for it."""
    folder = tmp_path_factory.mktemp("layouts")
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
    return functools.cache(
        lambda name: train(sums_data, folder / name, *LAYOUTS[name], *(more if name == "dp2_to_tp1" else ()))
    )

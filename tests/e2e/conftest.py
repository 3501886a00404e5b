from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sums_data(tmp_path_factory) -> Path:
    """The quickstart's data and its untrained model."""
    from megarl.data.sums_files import make_sums

    folder = tmp_path_factory.mktemp("sums")
    make_sums(folder, seed=0)
    return folder

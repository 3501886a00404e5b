"""The tests of this folder need the emulated device (`make test-hostcuda`). Without it they are not
collected."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("HOSTCUDA") else ["test_*.py"]


@pytest.fixture
def no_race_reports() -> Iterator[None]:
    """Races are not reported, so that their effect on the numbers is seen."""
    import _hostcuda

    before = _hostcuda.find_races(False)
    yield
    _hostcuda.find_races(before)

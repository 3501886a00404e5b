"""Every test of this folder that has nodes is a nightly one, and is skipped by name where nodes cannot be made."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.namespaces import why_not

HERE = Path(__file__).parent
QUICK = "test_node_watch.py"
"""The file whose nodes have no job in them: it takes seconds, and runs by default."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if item.path.parent == HERE]
    reason = why_not() if own else None
    for item in own:
        if item.path.name != QUICK:
            item.add_marker(pytest.mark.nightly)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all nodes see; each has a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-nodes-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)

"""Shared by tests/data: the quickstart's files, written once."""

import pytest

from sums.files import make_sums


@pytest.fixture(scope="session")
def sums_paths(tmp_path_factory):
    return make_sums(tmp_path_factory.mktemp("sums"), seed=0)

import pytest

from tests.runtime.jobs import Job


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.end()

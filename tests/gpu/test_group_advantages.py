"""tests/kernels/test_group_advantages.py on a GPU: `pytest tests/gpu/test_group_advantages.py`."""

from tests.kernels.test_group_advantages import *  # noqa: F403

"""tests/kernels/test_gae.py on a GPU: `pytest tests/gpu/test_gae.py`."""

from tests.kernels.test_gae import *  # noqa: F403

"""tests/kernels/test_kl.py on a GPU: `pytest tests/gpu/test_kl.py`."""

from tests.kernels.test_kl import *  # noqa: F403

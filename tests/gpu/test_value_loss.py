"""tests/kernels/test_value_loss.py on a GPU: `pytest tests/gpu/test_value_loss.py`."""

from tests.kernels.test_value_loss import *  # noqa: F403

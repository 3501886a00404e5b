"""tests/kernels/test_policy_loss.py on a GPU: `pytest tests/gpu/test_policy_loss.py`."""

from tests.kernels.test_policy_loss import *  # noqa: F403

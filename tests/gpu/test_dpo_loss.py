"""tests/kernels/test_dpo_loss.py on a GPU: `pytest tests/gpu/test_dpo_loss.py`."""

from tests.kernels.test_dpo_loss import *  # noqa: F403

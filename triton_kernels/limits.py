"""Constants that the PyTorch form and the Triton form of an op share."""

WHITEN_EPS = 1e-8
"""Added to the variance that `gae.whiten` divides by."""

MAX_K3 = 10.0
"""Largest value of the k3 estimate of a KL divergence."""

MAX_EXPONENT = 20.0
"""Bound of the log-ratio in k3: exp(-d) must not overflow, and a d this far from 0 is beyond MAX_K3 on both
sides."""

MAX_LOG_RATIO = 20.0
"""Bound of the log-ratio of the policy loss."""

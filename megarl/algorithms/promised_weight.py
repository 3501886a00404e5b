"""Say what the weights that a loss gives its tokens must add up to."""

from __future__ import annotations

from typing import Literal

from megarl.algorithms.base import Algorithm
from megarl.config.user_algorithm import is_in_file


def promised_weight(
    algorithm: Algorithm, loss: Literal["loss", "value_loss", "score_loss"], *counts: int
) -> float | None:
    """Return the `weight_sum` that belongs to one of the algorithm's losses, or None if a subclass has
    replaced the loss but not the sum, or the policy loss is a function of the user's, of any slope."""
    if loss == "loss" and is_in_file(getattr(algorithm, "policy_loss", "")):
        return None
    if loss == "score_loss":  # its tokens are samples, whose weights are the algorithm's to choose
        return None
    sum_name = {"loss": "weight_sum", "value_loss": "value_weight_sum"}[loss]
    classes = type(algorithm).__mro__
    of_loss, of_sum = (next(cls for cls in classes if name in vars(cls)) for name in (loss, sum_name))
    return getattr(algorithm, sum_name)(*counts) if issubclass(of_sum, of_loss) else None

"""Define what a trained role optimizes: which loss of the algorithm, computed from which columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megarl.algorithms.base import Algorithm, LossInputs, ScoreLossInputs, ValueLossInputs


@dataclass(frozen=True)
class Objective:
    """The loss of the algorithm that a trained role uses, and the columns of its inputs: the difference
    between actor and critic.

    Example, of a critic:
        Objective(
            loss="value_loss", inputs=ValueLossInputs, columns={"old_values": "values", "returns": "returns"},
            target="returns", output="values", before="old_values", what="value", token_weight=value_weight)
    """

    loss: str
    """Method of the algorithm that computes the loss."""
    inputs: type[LossInputs] | type[ValueLossInputs] | type[ScoreLossInputs]
    """Type of the method's argument."""
    columns: Mapping[str, str]
    """Field of the inputs -> token column that fills it.

    The field is None if the batch has no such column."""
    target: str
    """Column of the training target. It is NaN on the tokens of a sample whose reward failed."""
    output: str
    """Field of the inputs with the model's output in the update."""
    before: str
    """Field of the inputs with the model's output before the updates of the step."""
    what: str
    """Word for one number of the output, for error messages."""
    token_weight: Callable[[Algorithm, LossInputs | ValueLossInputs], torch.Tensor] | None = None
    """Function that measures the sum of the weights that the loss gives its tokens, see `loss_probes`; None
    where nothing is promised of it."""

"""An objective names the loss that a trained role minimizes, and what the loss is computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megarl.algorithms.base import Algorithm, LossInputs, ValueLossInputs


@dataclass(frozen=True)
class Objective:
    """The loss of a trained role: what differs between an actor's updates and a critic's.

    Example, of a critic:
        Objective(
            loss="value_loss", inputs=ValueLossInputs, columns={"old_values": "values", "returns": "returns"},
            target="returns", output="values", before="old_values", what="value", token_weight=value_weight)"""

    loss: str
    """Method of the algorithm that computes it."""
    inputs: type[LossInputs] | type[ValueLossInputs]
    """The type of its argument."""
    columns: Mapping[str, str]
    """Field of the inputs -> token column that fills it; None where the batch has no such column."""
    target: str
    """The column that is learnt. It is NaN on the tokens of a sample whose reward failed."""
    output: str
    """Field of the inputs with what the model computes in the update."""
    before: str
    """Field of the inputs with what the model computed before the updates of the step."""
    what: str
    """Word for one number of the output, for error messages."""
    token_weight: Callable[[Algorithm, LossInputs | ValueLossInputs], torch.Tensor]
    """Measures the sum of the weights that the loss gives its tokens, see `loss_probes`."""

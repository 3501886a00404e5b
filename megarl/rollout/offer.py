"""Let an engine in the trainer's process use the trainer's memory for weights that both hold alike."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megarl.reshard.alias import find_aliases
from megarl.reshard.atlas import Atlas


@dataclass
class Offer:
    """The trainer's parameters, offered to an engine that is being built in the same process."""

    atlas: Atlas
    parameters: dict[str, torch.Tensor]
    taken: dict[str, str] = field(default_factory=dict)
    """Set by the engine: name of its parameter -> the trainer's parameter whose memory it took over."""


def alias_weights(model: torch.nn.Module, atlas: Atlas, offer: Offer) -> dict[str, str]:
    """Make the model's parameters use the trainer's memory wherever both hold the same elements.

    Both must agree in dtype, device and layout.

    Returns: name in the model -> name of the trainer's parameter."""
    parameters, taken = dict(model.named_parameters()), {}
    for name, source in find_aliases(offer.atlas, atlas).items():
        weight, ours = parameters.get(name), offer.parameters[source]
        if (
            weight is not None
            and weight.dtype == ours.dtype
            and weight.device == ours.device
            and ours.is_contiguous()
        ):
            # A vector keeps its shape; a prepacked linear layer left an empty parameter behind.
            weight.data = ours.view(weight.shape if weight.numel() else ours.shape)
            taken[name] = source
    return taken

"""Hold two copies of an engine's weights and switch between them at no cost.

One copy generates while the other is written. vLLM's eager layers read `parameter.data` at every call, so
assigning `data` is the switch. CUDA graphs and compiled code keep the addresses that they were captured with.
A switch would have no effect on them."""

from __future__ import annotations

import torch
from torch import Tensor


class DoubleBuffer:
    """Two copies of the weights of one model.

    Args:
        model: the model whose parameters are switched.
        tensors: name -> live view of a parameter's storage, as a destination of the reshard plan.

    `front` generates. `back` has the same names and shapes and, at first, the same values."""

    def __init__(self, model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
        storages = {view.untyped_storage()._cdata: view.untyped_storage() for view in tensors.values()}
        clones = {key: storage.clone() for key, storage in storages.items()}
        self.front = tensors
        self.back = {
            name: _moved(view, clones[view.untyped_storage()._cdata]) for name, view in tensors.items()
        }
        self._parameters = [
            (p, p.data, _moved(p.data, clones[p.data.untyped_storage()._cdata]))
            for p in model.parameters()
            if p.data.untyped_storage()._cdata in clones
        ]

    def switch(self) -> None:
        """Swap the buffers, so that the engine generates with the former back buffer."""
        self._parameters = [(parameter, back, front) for parameter, front, back in self._parameters]
        for parameter, front, _ in self._parameters:
            parameter.data = front
        self.front, self.back = self.back, self.front


def _moved(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor with the same offset, shape and strides in another storage."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )

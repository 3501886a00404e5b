"""What vLLM's multi-head latent attention makes of kv_b_proj when a model is loaded: its halves, transposed,
which decoding multiplies with. They are parameters in vLLM and in no checkpoint. A transfer writes kv_b_proj,
and afterwards they must be made anew."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention


class DerivedLatents:
    """Of all layers of a model; nothing in a model without latent attention.

    Args:
        dtype: of the model's activations."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        layers = {
            prefix: module for prefix, module in model.named_modules() if isinstance(module, MLAAttention)
        }
        self._layers, self._dtype = list(layers.values()), dtype
        self.names = {
            f"{prefix}.{name}"
            for prefix, layer in layers.items()
            for name, _ in layer.named_parameters(recurse=False)
        }
        """Of the parameters that no transfer writes."""

    @torch.no_grad()
    def update(self) -> None:
        """In place, as CUDA graphs read them."""
        for layer in self._layers:
            layer.process_weights_after_loading(self._dtype)

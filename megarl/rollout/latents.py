"""Recompute the parameters that vLLM's multi-head latent attention derives from kv_b_proj.

When vLLM loads a model, it stores the transposed halves of kv_b_proj, which decoding multiplies with. They
are parameters in vLLM but in no checkpoint. A transfer writes kv_b_proj, so the halves must be recomputed
afterwards."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention


class DerivedLatents:
    """The parameters that vLLM derives from kv_b_proj in all layers of a model; none without latent
    attention.

    Args:
        dtype: dtype of the model's activations."""

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
        """Names of the parameters that no transfer writes."""

    @torch.no_grad()
    def update(self) -> None:
        """Recompute the derived parameters in place, because CUDA graphs read their addresses."""
        for layer in self._layers:
            layer.process_weights_after_loading(self._dtype)

"""Report which of NVIDIA's libraries Megatron would use on this machine."""

from __future__ import annotations

import importlib.util

import torch

from megarl.config.installed import apex_error
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.transformer_engine import transformer_engine_version


def fuses_gradient_accumulation() -> bool:
    """Return whether matrix products can add weight gradients to main_grad themselves.

    Transformer Engine's layers need no kernel for this. Megatron's own layers (the output layer) are built
    with the same option and need apex's kernel. Our output layer writes its gradient there in any case."""
    return (
        torch.cuda.is_available() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )


def libraries() -> dict[str, str]:
    """Return library name -> description of what is installed and used."""
    with cpu_megatron():
        from megatron.core.optimizer import Adam

    apex = "none" if importlib.util.find_spec("apex") is None else apex_error() or "NVIDIA's"
    return {
        "transformer_engine": transformer_engine_version() or "none",
        "apex": apex,
        "adam": f"{Adam.__module__.partition('.')[0]} {Adam.__name__}",
        "gradient_accumulation_fusion": "on" if fuses_gradient_accumulation() else "off",
    }

"""Compute frequencies of rotary embeddings, scaled as transformers and vLLM do.

Megatron's RotaryEmbedding receives the frequencies after it was built. Of llama3's scaling Megatron
hard-codes everything but the factor. Its YaRN reads factors from fields that TransformerConfig has only for
MLA."""

from __future__ import annotations

import math

import torch

Scaling = dict[str, object]


def inverse_frequencies(theta: float, head_dim: int, scaling: Scaling | None) -> torch.Tensor:
    """Return [head_dim / 2] fp32: for each pair of dimensions the angle between adjacent positions.

    Args:
        scaling: ModelShape.rope_scaling."""
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return plain
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"]
    return (
        _llama3(plain, scaling)
        if scaling["rope_type"] == "llama3"
        else _yarn(plain, theta, head_dim, scaling)
    )


def _llama3(plain: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Return rotary frequencies that are scaled as in Llama 3.1.

    Long wavelengths are stretched by the factor, short ones are kept, and those between are interpolated."""
    low, high, context = (
        scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    kept = ((context * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling["factor"] + kept * plain


def _yarn(plain: torch.Tensor, theta: float, head_dim: int, scaling: Scaling) -> torch.Tensor:
    """Return rotary frequencies that are scaled as in YaRN (arXiv:2309.00071, section 3.2).

    Dimensions that turn more than beta_fast times in the original context are kept. Dimensions that turn less
    than beta_slow times are stretched by the factor. Between them the stretch is a ramp over the
    dimensions."""

    def dimension(turns: float) -> float:
        return (
            head_dim
            * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first, last = dimension(scaling.get("beta_fast", 32)), dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    stretched = (
        (torch.arange(head_dim // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)
    ).clamp(0, 1)
    return stretched * plain / scaling["factor"] + (1 - stretched) * plain


def attention_factor(scaling: Scaling | None) -> float:
    """Return the factor by which YaRN multiplies cos and sin, or 1 without YaRN.

    The factor applies to both queries and keys, so logits have its square. `softmax_scale` contains this
    square."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0

    weights = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(weights[0]) / mscale(weights[1]) if all(weights) else mscale(1.0)

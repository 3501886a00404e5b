"""Layer modules for Megatron's local spec, where Transformer Engine is not installed."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.transformer.utils import is_layer_window_attention


class RMSNorm(torch.nn.Module):
    """RMSNorm (arXiv:1910.07467) that sequence parallelism knows: finalize_model_grads sums the gradient of a weight that
    is marked sequence_parallel over the tensor-parallel ranks. Megatron's WrappedTorchNorm refuses sequence parallelism.

    With layernorm_zero_centered_gamma it multiplies by 1 + weight, in fp32, and rounds the product (Gemma)."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps, self.zero_centered = config.layernorm_epsilon, config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.zero_centered:
            return F.rms_norm(x.float(), x.shape[-1:], 1 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


@functools.cache
def with_bias(linear: type) -> type:
    """The linear layer `linear` with a bias: TransformerConfig's add_bias_linear gives one to all of attention and MLP, or to none."""

    class BiasedLinear(linear):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **(kwargs | {"bias": True}))

    return BiasedLinear


class PackedAttention(torch.nn.Module):
    """core_attention on packed q [T, heads, d], k and v [T, kv heads, d] (THD): causal, grouped-query, one SDPA per sequence.

    Nothing is padded and no sequence sees another. On CPU one call per sequence is as fast as any padded or bucketed grid.
    A layer that slides (`window_size` of TransformerConfig) sees the last tokens of its sequence only."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale: float | None = None, **_) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError(f"--attention-dropout ({config.attention_dropout}): packed attention on CPU has none. Leave it at 0.")
        self.softmax_scale = softmax_scale
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if slides else None

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        lengths = packed_seq_params.sequence_lengths
        pieces = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend(q, k, v) for q, k, v in pieces], dim=2)[0].transpose(0, 1).flatten(1)  # [T, heads * d]

    def _attend(self, query, key, value) -> torch.Tensor:
        """[1, heads, tokens, d] of one sequence, or of the last of its tokens."""
        before, tokens, mask = key.shape[2] - query.shape[2], key.shape[2], None
        if before or (self.window is not None and tokens > self.window):
            mask = torch.ones(query.shape[2], tokens, dtype=torch.bool, device=key.device).tril(before)
            mask = mask if self.window is None else mask.triu(before + 1 - self.window)
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True, scale=self.softmax_scale)

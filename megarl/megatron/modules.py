"""Layer modules for Megatron's local spec, where Transformer Engine is not installed."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.Module):
    """RMSNorm (arXiv:1910.07467) that sequence parallelism knows: finalize_model_grads sums the gradient of a weight that
    is marked sequence_parallel over the tensor-parallel ranks. Megatron's WrappedTorchNorm refuses sequence parallelism."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = config.layernorm_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class PackedAttention(torch.nn.Module):
    """core_attention on packed q [T, heads, d], k and v [T, kv heads, d] (THD): causal, grouped-query, one SDPA per sequence.

    Nothing is padded and no sequence sees another. On CPU one call per sequence is as fast as any padded or bucketed grid."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale: float | None = None, **_) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError(f"--attention-dropout ({config.attention_dropout}): packed attention on CPU has none. Leave it at 0.")
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        lengths = packed_seq_params.sequence_lengths
        pieces = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (query, key, value)), strict=True)
        out = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.softmax_scale) for q, k, v in pieces]
        return torch.cat(out, dim=2)[0].transpose(0, 1).flatten(1)  # [T, heads * d]

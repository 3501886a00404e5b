"""Layer modules for Megatron's local spec, where Transformer Engine is not installed."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from megarl.megatron.context_parallel import gather_sequences
from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.transformer.utils import is_layer_window_attention


class RMSNorm(torch.nn.Module):
    """RMSNorm (arXiv:1910.07467) that supports sequence parallelism.

    Megatron's WrappedTorchNorm refuses sequence parallelism. This weight is marked sequence_parallel, so
    finalize_model_grads sums its gradient over the tensor-parallel ranks. With layernorm_zero_centered_gamma
    the module multiplies by 1 + weight, in fp32, and rounds the product (Gemma)."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps, self.zero_centered = config.layernorm_epsilon, config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.zero_centered:
            return F.rms_norm(x.float(), x.shape[-1:], 1 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def mlp_submodules(spec) -> object:
    """Return the submodules of the MLP or experts in a layer's spec. Changing them changes the spec."""
    return spec.submodules.mlp.keywords["submodules"]


@functools.cache
def with_bias(linear: type) -> type:
    """Return a subclass of the linear layer `linear` with a bias.

    TransformerConfig's add_bias_linear gives a bias to all layers of attention and MLP, or to none."""

    class BiasedLinear(linear):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **(kwargs | {"bias": True}))

    return BiasedLinear


class PackedAttention(torch.nn.Module):
    """core_attention on packed q [T, heads, d] and k, v [T, kv heads, d] (THD): causal and grouped-query.

    The layer calls SDPA once per sequence. Nothing is padded, and no sequence sees another. On CPU this is as
    fast as any padded or bucketed grid. A layer with a sliding window (`window_size` of TransformerConfig)
    sees only the last tokens of its sequence.

    With context parallelism one message gathers the keys and values of all ranks. Each of this rank's two
    chunks of a sequence (see context_parallel.py) attends to the part of the sequence that ends with the
    chunk."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale: float | None = None,
        pg_collection=None,
        **_,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError(
                f"--attention-dropout ({config.attention_dropout}): packed attention on CPU has "
                "none. Leave it at 0."
            )
        self.softmax_scale = softmax_scale
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if slides else None
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        lengths, cp = packed_seq_params.sequence_lengths, self.cp_group.size()
        if cp > 1:
            both = gather_sequences(
                torch.cat([key, value], dim=-1), packed_seq_params.gather_order, self.cp_group
            )
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        queries = query.split([length // cp for length in lengths], dim=2)
        sequences = zip(queries, key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True)
        out = [attended for q, k, v in sequences for attended in self._sequence(q, k, v)]
        return torch.cat(out, dim=2)[0].transpose(0, 1).flatten(1)  # [T, heads * d]

    def _sequence(self, query, key, value) -> list[torch.Tensor]:
        """Return this rank's attention output of one sequence, one tensor [1, heads, tokens, d] per chunk.

        `key` and `value` hold the whole sequence."""
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        if cp == 1:
            return [self._attend(query, key, value)]
        chunk = query.shape[2] // 2
        ends = ((rank + 1) * chunk, (2 * cp - rank) * chunk)
        return [
            self._attend(q, key[:, :, :end], value[:, :, :end])
            for q, end in zip(query.split(chunk, dim=2), ends, strict=True)
        ]

    def _attend(self, query, key, value) -> torch.Tensor:
        """Return the output of causal attention for the last tokens of a sequence. `query` has these tokens,
        `key` and `value` have all tokens.

        SDPA's own causal mask would treat the queries as the first tokens."""
        length, before, mask = key.shape[2], key.shape[2] - query.shape[2], None
        slides = self.window is not None and length > self.window
        if before or slides:
            mask = torch.ones(query.shape[2], length, dtype=torch.bool, device=key.device).tril(before)
            mask = mask.triu(before + 1 - self.window) if slides else mask
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=True, scale=self.softmax_scale
        )

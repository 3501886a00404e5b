"""Self-attention for linear_qkv with rows in vLLM's order, which Megatron's own layer does not support."""

from __future__ import annotations

from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.transformer.attention import SelfAttention


class StackedQKVSelfAttention(SelfAttention):
    """Self-attention whose linear_qkv returns [query heads; key heads; value heads] of this rank.

    Megatron returns [q, ..., q, k, v] of each query group. The matrix is the same and only its rows are in
    another order, so heads and results do not change. Each rank needs complete groups (`megatron_atlas`
    refuses more ranks than groups), so nothing is gathered."""

    def __init__(self, config, *args, **kwargs) -> None:
        if config.attention_output_gate or config.fused_single_qkv_rope:
            flag = "attention_output_gate" if config.attention_output_gate else "fused_single_qkv_rope"
            raise ValueError(
                f"--{flag.replace('_', '-')} (true) expects Megatron's order of linear_qkv's rows. "
                "Use --qkv-layout grouped."
            )
        super().__init__(config, *args, **kwargs)

    def get_query_key_value_tensors(
        self, hidden_states, key_value_states=None, output_gate=False, split_qkv=True
    ):
        """Return query [T, b, heads, d], key and value [T, b, groups, d] of hidden states [T, b, hidden]."""
        mixed, _ = self.linear_qkv(hidden_states)
        heads = (
            self.num_attention_heads_per_partition,
            self.num_query_groups_per_partition,
            self.num_query_groups_per_partition,
        )
        query, key, value = mixed.unflatten(-1, (sum(heads), self.hidden_size_per_attention_head)).split(
            heads, dim=-2
        )
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value

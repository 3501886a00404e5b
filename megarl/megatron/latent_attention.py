"""Multi-head latent attention (arXiv:2405.04434) without the global parallel_state, for Megatron's local and
Transformer Engine's layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.modules import PackedAttention

with cpu_megatron():
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
    from megatron.core.transformer.spec_utils import build_module


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without bias whose weight [out, in] is whole on every tensor-parallel rank.

    Transformer Engine calls this duplicated. Under sequence parallelism each rank sees a part of the tokens,
    and finalize_model_grads sums the gradient of the weight."""

    def __init__(self, input_size: int, output_size: int, *, config, init_method, **_) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention, built from the process groups of one role and with whole down projections
    on every rank.

    Every layer receives its process group, with either spec. Megatron's constructor leaves linear_q_proj
    to the global parallel_state, which has no groups here. Its local spec splits the down projections,
    and gathers their outputs over that state too."""

    def __init__(self, config, submodules, layer_number: int, **options) -> None:
        MultiLatentAttention.__init__(
            self, config, submodules, layer_number, attention_type="self", **options
        )
        queries, hidden = config.num_attention_heads * self.q_head_dim, config.hidden_size
        if config.q_lora_rank is None:
            self.linear_q_proj = self._up(submodules.linear_q_proj, hidden, queries, "q_proj")
        else:
            self.linear_q_down_proj = self._down(
                submodules.linear_q_down_proj, hidden, config.q_lora_rank, "q_down_proj"
            )
            self.linear_q_up_proj = self._up(
                submodules.linear_q_up_proj, config.q_lora_rank, queries, "q_up_proj"
            )
            self.q_layernorm = self._norm(submodules.q_layernorm, config.q_lora_rank)
        latent, expanded = (
            config.kv_lora_rank,
            config.num_attention_heads * (config.qk_head_dim + config.v_head_dim),
        )
        self.linear_kv_down_proj = self._down(
            submodules.linear_kv_down_proj, hidden, latent + config.qk_pos_emb_head_dim, "kv_down_proj"
        )
        self.linear_kv_up_proj = self._up(submodules.linear_kv_up_proj, latent, expanded, "kv_up_proj")
        self.kv_layernorm = self._norm(submodules.kv_layernorm, latent)

    def _run_core_attention(self, query, key, value, *args, **kwargs):
        """Call local attention with values of their own size. Megatron pads them to the size of keys."""
        if isinstance(self.core_attention, PackedAttention):
            return self.core_attention(query, key, value, *args, **kwargs)
        return super()._run_core_attention(query, key, value, *args, **kwargs)

    def _down(self, spec, input_size: int, output_size: int, name: str) -> torch.nn.Module:
        layer = build_module(
            spec,
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            parallel_mode="duplicated",
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
            is_expert=False,
            tp_comm_buffer_name=name,
            tp_group=None,
        )
        # Transformer Engine marks the weight of every linear layer as split (module/linear.py:
        # is_parallel=True). The gradient norm would count this weight once per tensor-parallel rank.
        layer.weight.tensor_model_parallel = False
        return layer

    def _up(self, spec, input_size: int, output_size: int, name: str) -> torch.nn.Module:
        return build_module(
            spec,
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name=name,
            tp_group=self.pg_collection.tp,
        )

    def _norm(self, spec, size: int) -> torch.nn.Module:
        return build_module(spec, hidden_size=size, config=self.config, eps=self.config.layernorm_epsilon)

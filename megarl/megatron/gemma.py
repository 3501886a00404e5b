"""Gemma 3's additions to Megatron's blocks.

The additions are norms after attention and MLP, two rotary embeddings, and scaled embeddings. Gemma's norms
multiply by 1 + weight (`layernorm_zero_centered_gamma`). Its attention windows are `window_size` and
`window_attn_skip_freq` of TransformerConfig. With Transformer Engine the same modules surround its layers;
this was not run yet."""

from __future__ import annotations

import functools
import math

import torch

from megarl.config.hf_config import ModelShape
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.modules import RMSNorm, mlp_submodules
from megarl.megatron.rope import inverse_frequencies

with cpu_megatron():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.core.transformer.utils import is_layer_window_attention


@functools.cache
def with_output_norm(linear: type) -> type:
    """Return a subclass of the row-parallel layer `linear` that applies an RMSNorm to its output after the
    sum over ranks.

    Under sequence parallelism this output is a part of the sequence."""

    class NormedLinear(linear):
        def __init__(self, input_size: int, output_size: int, *, config, **kwargs) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = RMSNorm(config, output_size)
            self.register_forward_hook(_norm_output)  # a hook, so that an adapter's hook can run first

    return NormedLinear


def _norm_output(
    linear: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, None]:
    assert output[1] is None, "the norm is of the output with its bias"
    return linear.post_layernorm(output[0]), None


class TwoRotaryEmbeddings(RotaryEmbedding):
    """Rotary embeddings with the angles of global layers and of sliding-window layers.

    The result is one tensor [2, S, 1, 1, d], of which `GemmaLayer` takes its part. It is not a pair, because
    full recompute saves only tensors."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        self.inv_freq = self.inv_freq.to(torch.cuda.current_device())
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        angles = positions[:, None] * self.inv_freq[:, None]  # [2, S, d / 2]
        return torch.cat([angles, angles], dim=-1)[:, :, None, None]


class GemmaLayer(TransformerLayer):
    def forward(self, *args, rotary_pos_emb: torch.Tensor, **kwargs):
        slides = is_layer_window_attention(
            self.config.window_size, self.config.window_attn_skip_freq, self.layer_number
        )
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[int(slides)], **kwargs)


def adapt_spec(spec: ModuleSpec) -> None:
    """Change the spec of Megatron's layer, in place, into the spec of Gemma 3's layer."""
    spec.module = GemmaLayer
    attention, mlp = spec.submodules.self_attention.submodules, mlp_submodules(spec)
    attention.linear_proj, mlp.linear_fc2 = (
        with_output_norm(attention.linear_proj),
        with_output_norm(mlp.linear_fc2),
    )


def adapt_model(model: GPTModel, shape: ModelShape) -> None:
    """Give the model Gemma 3's two rotary embeddings and, on the first pipeline stage, its scaled word
    embeddings."""
    frequencies = [
        inverse_frequencies(shape.rope_theta, shape.head_dim, shape.rope_scaling),
        inverse_frequencies(shape.local_rope_theta, shape.head_dim, None),
    ]
    model.rotary_pos_emb = TwoRotaryEmbeddings(
        shape.head_dim,
        rotary_percent=1.0,
        use_cpu_initialization=True,
        cp_group=model.rotary_pos_emb.cp_group,
    )
    model.rotary_pos_emb.inv_freq = torch.stack(frequencies)
    if model.pre_process and shape.scaled_embeddings:
        # transformers rounds the scale to the dtype of the weights.
        scale = torch.tensor(math.sqrt(shape.hidden_size)).to(model.config.params_dtype).item()
        model.embedding.register_forward_hook(lambda module, arguments, output: output * scale)

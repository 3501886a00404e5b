"""Frequencies of scaled rotary embeddings against those of transformers and of the rotary embeddings that
vLLM builds from the same config.json.

pytest tests/megatron/test_rope.py"""

from __future__ import annotations

import pytest
import torch

from megarl.config.hf_families import rope_errors, rope_parameters, scaling
from megarl.megatron.rope import attention_factor, inverse_frequencies

HEAD_DIM = 64
CASES = {
    "default": dict(rope_type="default", rope_theta=1e6),
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=8.0),
    "llama 3.1": dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "llama3, other bands": dict(
        rope_type="llama3",
        rope_theta=1e4,
        factor=32.0,
        low_freq_factor=2.0,
        high_freq_factor=3.0,
        original_max_position_embeddings=512,
    ),
    "qwen's yarn": dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768),
    "yarn, its own factor": dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=2.0,
        original_max_position_embeddings=512,
        attention_factor=1.5,
    ),
    "yarn, every key": dict(
        rope_type="yarn",
        rope_theta=1e5,
        factor=16.0,
        original_max_position_embeddings=256,
        beta_fast=16,
        beta_slow=2,
        mscale=0.7,
        mscale_all_dim=1.2,
        truncate=False,
    ),
    "yarn, one bound": dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=8),
}


def ours(parameters: dict) -> tuple[torch.Tensor, float]:
    rope = rope_parameters({"rope_parameters": parameters, "max_position_embeddings": 1024})
    assert not list(rope_errors(rope))
    return inverse_frequencies(rope["rope_theta"], HEAD_DIM, scaling(rope)), attention_factor(scaling(rope))


@pytest.mark.parametrize("name", CASES)
def test_transformers_has_the_same(name):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=2 * HEAD_DIM, num_attention_heads=2, rope_parameters=dict(CASES[name]))
    )
    frequencies, factor = ours(CASES[name])
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)  # a few roundings in fp32
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_vllm_has_the_same(name):
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(HEAD_DIM, max_position=1024, rope_parameters=dict(CASES[name]), dtype=torch.float32)
    frequencies, factor = ours(CASES[name])
    angles = torch.outer(torch.arange(32.0), frequencies)
    wanted = torch.cat([angles.cos(), angles.sin()], -1) * factor
    torch.testing.assert_close(
        theirs.cos_sin_cache[:32].float(), wanted, rtol=0, atol=2e-5
    )  # angles up to 32 in fp32

"""Tiny random models in Hugging Face folders, with what makes names and sizes differ between families."""

from __future__ import annotations

import json
from pathlib import Path

import torch

COMMON = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rope_theta=10000.0,
)


def make_folder(folder: Path, family: str, **changes: object) -> Path:
    """A causal language model: qwen2 (biases, tied, a vocabulary that needs padding), qwen3 (q/k norms, 4
    layers), qwen3_moe (4 experts) or deepseek_v3 (latent attention, a dense layer before a mixture whose
    router has a correction)."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    config = {
        "qwen2": lambda: Qwen2Config(**COMMON | dict(vocab_size=130, tie_word_embeddings=True) | changes),
        "qwen3": lambda: Qwen3Config(
            **COMMON
            | dict(vocab_size=150, head_dim=32, num_hidden_layers=4, tie_word_embeddings=False)
            | changes
        ),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **COMMON
            | dict(
                vocab_size=128,
                head_dim=32,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=48,
                norm_topk_prob=True,
            )
            | changes
        ),
        "deepseek_v3": lambda: DeepseekV3Config(
            **COMMON
            | dict(
                vocab_size=128,
                num_key_value_heads=4,
                kv_lora_rank=20,
                q_lora_rank=24,
                qk_nope_head_dim=12,
                qk_rope_head_dim=8,
                v_head_dim=10,
                moe_intermediate_size=24,
                n_shared_experts=2,
                first_k_dense_replace=1,
                num_experts_per_tok=3,
                n_routed_experts=8,
                n_group=2,
                topk_group=1,
                topk_method="noaux_tc",
                scoring_func="sigmoid",
                tie_word_embeddings=False,
            )
            | changes
        ),
    }[family]()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name or "bias" in name else 0.1)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 128}))
    return folder

"""What the engine scripts share: tiny random models in Hugging Face folders, jobs on them, and transformers
as the reference."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megarl.algorithms import GRPO
from megarl.config.hf_config import FAMILIES
from megarl.config.schema import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    ReshardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)

EOS, STOP_IDS = 3, (4, 5, 6, 7, 8, 9)
_COMMON = dict(
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    eos_token_id=EOS,
    bos_token_id=None,
    pad_token_id=0,
    rope_theta=10000.0,
)
_EXPERTS = _COMMON | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LOCAL = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
}
# Biases and tied embeddings; the same with layers for two stages of two chunks; q/k norms; neither, a
# vocabulary that needs no padding and a scaled rotary embedding; a window of tokens; windows in every other
# layer; experts whose width vLLM pads.
CONFIGS = {
    "qwen2": Qwen2Config(vocab_size=130, tie_word_embeddings=True, **_COMMON),
    "qwen2_deep": Qwen2Config(vocab_size=130, tie_word_embeddings=True, **_COMMON | {"num_hidden_layers": 4}),
    "qwen3": Qwen3Config(vocab_size=150, tie_word_embeddings=False, **_COMMON),
    "llama": LlamaConfig(vocab_size=128, tie_word_embeddings=False, **(_COMMON | {"rope_parameters": _YARN})),
    "llama_biases": LlamaConfig(
        vocab_size=129, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, **_COMMON
    ),
    "mistral": MistralConfig(vocab_size=140, sliding_window=8, tie_word_embeddings=False, **_COMMON),
    "gemma3": Gemma3TextConfig(
        vocab_size=150,
        sliding_window=8,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        **_COMMON,
        **_LOCAL,
    ),
    "qwen3_moe": Qwen3MoeConfig(vocab_size=150, tie_word_embeddings=False, **_EXPERTS),
    "mixtral": MixtralConfig(
        vocab_size=141, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False, **_COMMON
    ),
}
_LATENTS = dict(
    num_key_value_heads=4,
    kv_lora_rank=512,
    q_lora_rank=24,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    n_shared_experts=2,
    first_k_dense_replace=1,
)
# Of no table; vLLM's latent attention on a CPU is for these ranks only.
UNTABLED = {
    "deepseek_v3": DeepseekV3Config(
        vocab_size=107,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        **{key: value for key, value in (_COMMON | _LATENTS).items() if key != "head_dim"},
    )
}


def _otherwise_tied(config):
    return type(config).from_dict(config.to_dict() | {"tie_word_embeddings": not config.tie_word_embeddings})


CONFIGS |= {
    f"{name}_{'untied' if config.tie_word_embeddings else 'tied'}": _otherwise_tied(config)
    for name, config in CONFIGS.items()
}


def reference_model(name: str, seed: int, std: float = 0.15) -> PreTrainedModel:
    """Random weights that are far from uniform: log-probs spread over several nats, so a wrong weight cannot
    hide."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        (CONFIGS | UNTABLED)[name], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(
                    0.3 if name.startswith("gemma") else 1.0, 0.2
                )  # Gemma's norms multiply by 1 + weight
            else:
                parameter.normal_(0.0, std)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def make_folder(folder: Path, name: str, with_tokenizer: bool = False) -> Path:
    """config.json only: the engine starts without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    CONFIGS[name].architectures = [FAMILIES[CONFIGS[name].model_type].architecture]
    CONFIGS[name].save_pretrained(folder)
    if with_tokenizer:
        from tokenizers import Tokenizer, decoders, models

        tokenizer = Tokenizer(
            models.WordLevel({f"<{i}>": i for i in range(CONFIGS[name].vocab_size)}, unk_token="<0>")
        )
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"<{EOS}>"})
        )
    return folder


def job(folder: Path, *, sampling: dict | None = None, alias: bool = False, **rollout) -> TrainConfig:
    return TrainConfig(
        algorithm=GRPO(),
        model=ModelConfig(model=str(folder)),
        batch=BatchConfig(train_iters=1),
        data=DataConfig(train_data=("unused.jsonl",)),
        run=RunConfig(save="unused"),
        reshard=ReshardConfig(reshard_alias=alias),
        rollout=RolloutConfig(**{"max_num_seqs": 32, **rollout}),
        sampling=SamplingConfig(**{"max_prompt_length": 200, "max_response_length": 24, **(sampling or {})}),
    )


def full_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors as [rows, cols] views of the live model."""
    out = {}
    for name, p in model.named_parameters():  # a tied lm_head is not among them
        if p.dim() == 3:  # transformers stacks the experts; the checkpoint has them one by one
            out |= _experts(name, p.data)
        else:
            out[name] = p.data if p.dim() == 2 else p.data.unsqueeze(1)
    return out


def _experts(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    prefix, kind = name.rsplit(".", 1)
    parts = (
        zip(("gate", "up"), stacked.chunk(2, 1), strict=True)
        if kind == "gate_up_proj"
        else [("down", stacked)]
    )
    return {
        f"{prefix}.{e}.{part}_proj.weight": tensor[e] for part, tensor in parts for e in range(len(stacked))
    }


def prompts(count: int, vocab_size: int, seed: int = 0, length: tuple[int, int] = (1, 20)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(*length, (count,), generator=generator).tolist()
    return [torch.randint(10, vocab_size, (size,), generator=generator).tolist() for size in sizes]


@torch.no_grad()
def log_probs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """[len(response), V] log-softmax(logits / T) of the reference at each response position."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)


def sampled_log_probs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """[len(response)] log pi(token) of the reference."""
    return log_probs(model, prompt, response, temperature).gather(1, torch.tensor(response)[:, None])[:, 0]


def largest_shortfall(
    model: PreTrainedModel, asked: list[list[int]], keys: list[int], responses: list, temperature: float = 1.0
) -> float:
    """By how much a sampled token misses the maximum of log-prob + noise, at most.

    The noise is computed from what megarl/rollout/draws.py says, without its code. 0 but for rounding, as
    each sampled token must be the maximum; some 5 with any other noise."""
    worst = 0.0
    for prompt, key, r in zip(asked, keys, responses, strict=True):
        for index, scores in enumerate(log_probs(model, prompt, r.token_ids, temperature).double()):
            noise_key = _mixed(_split_mix(key, len(prompt) + index))  # vLLM's kernel mixes the seed once more
            bits = [_split_mix(noise_key, token) >> 11 for token in range(len(scores))]
            bits = torch.tensor(bits, dtype=torch.float64)
            scores = scores - (-((bits + 0.5) / 2**53).log()).log()
            worst = max(worst, (scores.max() - scores[r.token_ids[index]]).item())
    return worst


def _split_mix(start: int, number: int) -> int:
    """Return output `number`, from 0, of the generator SplitMix64 (Steele, Lea, Flood 2014) in Python's
    integers."""
    return _mixed((start + (number + 1) * 0x9E3779B97F4A7C15) % 2**64)


def _mixed(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def largest_gap(
    model: PreTrainedModel, asked: list[list[int]], responses: list, temperature: float = 1.0
) -> float:
    """max |engine log-prob - reference log-prob| over all sampled tokens."""
    gaps = [
        (sampled_log_probs(model, prompt, r.token_ids, temperature) - torch.tensor(r.log_probs)).abs()
        for prompt, r in zip(asked, responses, strict=True)
    ]
    return torch.cat(gaps).max().item()

"""A small policy and critic on one device, in fp32 and bf16: what they compute, before and after updates.
test_policy.py compares the devices.

    python tests/gpu/run_policy.py cpu|cuda OUT_FOLDER"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

device, out = sys.argv[1], Path(sys.argv[2])
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
if device == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
import torch.distributed as dist

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.initialize import random_weights
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.megatron.transformer_engine import uses_transformer_engine
from megarl.megatron.value_model import ValueModel
from megarl.reshard.megatron_atlas import megatron_atlases

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "eos_token_id": 1,
}
MESH = MeshSpec((0,))
PROMPTS, RESPONSES, LENGTHS = 8, 32, (9, 31, 64, 17)
UPDATES = 3


def main() -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    create_groups(MESH)
    (out / "config.json").write_text(json.dumps(CONFIG))
    report = {
        f"{name}, {dtype}": compute(dtype == "bf16")
        for dtype in ("fp32", "bf16")
        for name, compute in (("policy", policy_numbers), ("critic", critic_numbers))
    }
    (out / f"{device}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def policy_numbers(bf16: bool) -> dict[str, list[float]]:
    policy = build(Policy, bf16)

    def loss(micro, log_probs, entropy, rows):
        value = -log_probs.sum() / num_tokens()
        return value, {"loss": value.detach()}

    def numbers() -> list[float]:
        return flat(policy.log_probs(micro_batches(), temperature=0.7))

    return trained(policy, numbers, lambda: policy.update(micro_batches(), loss, temperature=0.7))


def critic_numbers(bf16: bool) -> dict[str, list[float]]:
    critic = build(ValueModel, bf16)
    with torch.no_grad():
        for name, head in critic.parameters.items():
            if "value_head" in name:  # random weights leave it at 0
                head.copy_(torch.linspace(-0.1, 0.1, head.numel()).view_as(head))
    critic.parameters_changed()

    def loss(micro, values):
        value = (values - 1).square().sum() / num_tokens()
        return value, {"loss": value.detach()}

    return trained(
        critic, lambda: flat(critic.values(micro_batches())), lambda: critic.update(micro_batches(), loss)
    )


def build(kind: type, bf16: bool) -> Policy | ValueModel:
    shape = ModelShape.load(str(out), value_head=kind is ValueModel)
    config = ModelConfig(model=str(out), bf16=bf16)
    model = kind(shape, MESH, config, ParallelConfig(), OptimizerConfig(lr=1e-3))
    atlas = megatron_atlases(shape, MESH, uses_transformer_engine())[0]
    random_weights(shape, atlas, model.parameters, seed=0)
    model.parameters_changed()
    return model


def micro_batches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)

    def tokens(lengths: tuple[int, ...]) -> list[list[int]]:
        return [torch.randint(2, 2048, (n,), generator=generator).tolist() for n in lengths]

    batch = Batch.from_samples([0, 1, 2, 3], tokens((PROMPTS,) * 4), tokens(LENGTHS))
    return [MicroBatch.of(batch.select(rows)) for rows in ([0, 1], [2, 3])]


def num_tokens() -> int:
    return sum(LENGTHS)


def flat(parts: list[torch.Tensor]) -> list[float]:
    return torch.cat(parts).tolist()


def trained(model, numbers, update) -> dict[str, list[float]]:
    """Return the numbers before and after the updates, and each update's loss and gradient norm."""
    report = {"before": numbers(), "loss": [], "grad_norm": []}
    for _ in range(UPDATES):
        model.advance_schedule()
        metrics = update()
        report["loss"].append(float(metrics["loss"]))
        report["grad_norm"].append(float(metrics[f"{model.prefix}/grad_norm"]))
    return report | {"after": numbers()}


if __name__ == "__main__":
    main()

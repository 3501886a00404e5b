"""Update, save and export small models on one rank, on the emulated device or on the CPU. Writes numbers and
digests of weights to a JSON file for test_policy.py, which compares the two.

    run_policy.py OUT_FOLDER"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.role_sections import OFFLOAD_PARTS
from megarl.config.schema import LoRAConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.initialize import random_weights
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.megatron.random_state import random_state, set_random_state
from megarl.megatron.trained_model import TrainedModel
from megarl.megatron.training_state import load_checkpoint, save_checkpoint
from megarl.megatron.value_model import ValueModel
from megarl.reshard.hf_weights import save_hf
from megarl.reshard.lora_atlas import with_adapters
from megarl.reshard.megatron_atlas import megatron_atlases

MESH = MeshSpec((0,))
VOCABULARY = 130
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "eos_token_id": 1,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS = {
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "tie_word_embeddings": False,
        **EXPERTS,
    },
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
CASES: dict[str, dict[str, object]] = {
    "dense": {"model": "qwen3"},
    "tied": {"model": "qwen2"},
    "full recompute": {"model": "qwen3", "parallel": FULL},
    "selective recompute": {"model": "qwen2", "parallel": SELECTIVE},
    "bf16": {"model": "qwen3", "bf16": True},
    "plain Adam": {"model": "qwen3", "optimizer": {"use_distributed_optimizer": False}},
    "bf16, plain Adam": {"model": "qwen3", "bf16": True, "optimizer": {"use_distributed_optimizer": False}},
    "adapters": {"model": "qwen3", "lora": True},
    "experts": {"model": "qwen3_moe"},
    "experts, bf16": {"model": "qwen3_moe", "bf16": True},
    "critic": {"model": "qwen3", "critic": True},
    "offload": {"model": "qwen3", "offload": True},
    "offload, bf16": {"model": "qwen3", "offload": True, "bf16": True},
}
SAVED = ("dense", "bf16", "plain Adam", "adapters", "experts", "critic")
"""Cases that are also saved, resumed and exported."""


class Case:
    """One model, with weights that depend on its name only."""

    def __init__(self, out: Path, name: str) -> None:
        self.name, self.options, self.folder = name, CASES[name], out / CASES[name]["model"]
        self.out, self.critic = out / name.replace(", ", "_").replace(" ", "_"), "critic" in self.options
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(COMMON | MODELS[self.options["model"]]))
        self.shape = ModelShape.load(str(self.folder), value_head=self.critic)
        self.lora = LoRAConfig(lora_rank=4, lora_alpha=8.0) if "lora" in self.options else None
        atlas = megatron_atlases(self.shape, MESH)[0]
        self.base, self.atlas = atlas, with_adapters(atlas, self.lora) if self.lora else atlas

    def build(self, weights: bool) -> TrainedModel:
        model = (ValueModel if self.critic else Policy)(
            self.shape,
            MESH,
            ModelConfig(model=str(self.folder), bf16="bf16" in self.options),
            ParallelConfig(**self.options.get("parallel", {})),
            OptimizerConfig(lr=1e-3, **self.options.get("optimizer", {})),
            lora=self.lora,
        )
        if weights:
            random_weights(self.shape, self.base, model.parameters, seed=0)
            generator = torch.Generator().manual_seed(4)
            for name, parameter in model.parameters.items():  # away from 0, where adapters and critics start
                if name not in self.base or "value_head" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            model.parameters_changed()
        return model

    def outputs(self, model: TrainedModel) -> list[float]:
        micros = micro_batches()
        values = model.values(micros) if self.critic else model.log_probs(micros, 0.8)
        return torch.cat(values).tolist()

    def update(self, model: TrainedModel) -> dict[str, float]:
        model.advance_schedule()
        if self.critic:
            metrics = model.update(micro_batches(), value_loss)
        else:
            metrics = model.update(micro_batches(), policy_loss, temperature=0.8, with_entropy=True)
        if "offload" in self.options:
            model.memory.offload(OFFLOAD_PARTS)
            others = torch.full((300_000,), 7.0, device=model.device)  # the memory that became free
            model.memory.load(OFFLOAD_PARTS)
            del others
        return {name: float(value) for name, value in metrics.items()}

    def run(self) -> dict[str, object]:
        model = self.build(weights=True)
        report: dict[str, object] = {
            "device": str(model.device),
            "before": self.outputs(model),
            "updates": [self.update(model) for _ in range(3)],
            "after": self.outputs(model),
        }
        report["weights"], report["optimizer"] = self.weights_digest(model), optimizer_digest(model)
        if self.name in SAVED:
            report |= self.save_and_resume(model)
        return report

    def weights_digest(self, model: TrainedModel) -> str:
        """Return the digest of what the atlas names; rows that pad a vocabulary belong to nobody."""
        return digest(
            model.parameters[name][piece.local_row :, piece.local_col :][
                : piece.row_end - piece.row_start, : piece.col_end - piece.col_start
            ]
            for name, param in self.atlas.items()
            for piece in param.pieces
        )

    def save_and_resume(self, model: TrainedModel) -> dict[str, object]:
        save_checkpoint(self.out / "checkpoint", model, self.atlas, {"step": 3})
        resumed = self.build(weights=False)
        told = load_checkpoint(self.out / "checkpoint", resumed, self.atlas)
        report = {
            "told": told["step"] if isinstance(told, dict) else None,
            "went on": [self.update(model), self.weights_digest(model), optimizer_digest(model)],
            "resumed": [self.update(resumed), self.weights_digest(resumed), optimizer_digest(resumed)],
            "step devices": sorted(step_devices(resumed)),
        }
        if self.lora:
            model.merge_adapters()
        save_hf(str(self.out / "exported"), str(self.folder), self.shape, {0: self.base}, model.weights)
        exported = load_file(self.out / "exported" / "model.safetensors")
        return report | {"exported": {name: tensor.float().sum().item() for name, tensor in exported.items()}}


def micro_batches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    prompts, responses = (torch.randint(0, VOCABULARY, (6, n), generator=generator).tolist() for n in (5, 11))
    batch = Batch.from_samples(list(range(6)), prompts, responses)
    batch.advantages = torch.randn(len(batch.tokens), generator=generator) * batch.response_mask
    return [MicroBatch.of(batch.select(rows)) for rows in ([0, 1, 2], [3, 4, 5])]


def policy_loss(micro, log_probs, entropy, rows):
    value = -(log_probs * micro.column("advantages")[rows].to(log_probs.device) + 0.01 * entropy).sum() / 66
    return value, {"loss": value.detach()}


def value_loss(micro, values):
    value = 0.5 * (values - micro.column("advantages").to(values.device)).square().sum() / 66
    return value, {"loss": value.detach()}


def digest(tensors) -> str:
    parts = (t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _adams(model: TrainedModel) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer])]


def optimizer_digest(model: TrainedModel) -> str:
    model.memory.use("optimizer")
    states = [state for adam in _adams(model) for state in adam.state.values()]
    return digest(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))


def step_devices(model: TrainedModel) -> set[str]:
    """Return the devices of the moments and, where they are tensors, of the counters."""
    states = (state for adam in _adams(model) for state in adam.state.values())
    return {value.device.type for state in states for value in state.values() if torch.is_tensor(value)}


def random_numbers() -> dict[str, bool]:
    """A random state that is restored gives the same numbers."""
    state = random_state()
    draw: Callable[[], torch.Tensor] = lambda: torch.rand(
        4, device="cuda" if torch.cuda.is_available() else "cpu"
    )
    first = draw()
    set_random_state(state)
    return {"the same again": torch.equal(draw(), first)}


def main(out: Path) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    # The CPU's flash attention has no counterpart on the emulated device.
    torch.backends.cuda.enable_flash_sdp(False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    create_groups(MESH)
    report = {name: Case(out, name).run() for name in CASES}
    report["random"] = random_numbers()
    (out / "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

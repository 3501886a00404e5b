"""Three updates of a policy of 30M parameters on one GPU, with and without offload between them. Writes a
JSON report for test_offload.py.

python tests/gpu/run_offload.py OUT_FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
import torch
import torch.distributed as dist

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.role_sections import OFFLOAD_PARTS
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.initialize import random_weights
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.megatron.transformer_engine import uses_transformer_engine
from megarl.reshard.megatron_atlas import megatron_atlases

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "eos_token_id": 1,
}
MESH = MeshSpec((0,))
STEPS = 3
RESPONSE_LENGTH = 8 if "HOSTCUDA" in os.environ else 48
"""Fewer tokens on the emulated device, whose matrix products are a CPU's."""


def build(folder: Path, bf16: bool = False, **optimizer) -> Policy:
    shape = ModelShape.load(str(folder))
    policy = Policy(
        shape,
        MESH,
        ModelConfig(model=str(folder), bf16=bf16),
        ParallelConfig(),
        OptimizerConfig(lr=1e-3, **optimizer),
    )
    random_weights(
        shape, megatron_atlases(shape, MESH, uses_transformer_engine())[0], policy.parameters, seed=0
    )
    policy.parameters_changed()
    return policy


def micro_batches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    prompts, responses = (
        torch.randint(0, 16384, (8, n), generator=generator).tolist() for n in (16, RESPONSE_LENGTH)
    )
    batch = Batch.from_samples(list(range(8)), prompts, responses)
    return [MicroBatch.of(batch.select(rows)) for rows in ([0, 1, 2, 3], [4, 5, 6, 7])]


def loss(micro, log_probs, entropy, rows):
    value = -log_probs.sum() / (8 * RESPONSE_LENGTH)
    return value, {"loss": value.detach()}


def update(policy: Policy) -> None:
    policy.advance_schedule()
    policy.update(micro_batches(), loss, temperature=1.0)


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    ).hexdigest()


def weights_and_states(policy: Policy) -> tuple[str, str]:
    adams = [part.optimizer for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])]
    return digest(list(policy.parameters.values())), digest(
        [s[key] for a in adams for s in a.state.values() for key in ("exp_avg", "exp_avg_sq")]
    )


def compare(folder: Path, **kind) -> dict:
    policy, out = build(folder, **kind), {}
    for _ in range(STEPS):
        update(policy)
    out["weights_without"], out["states_without"] = weights_and_states(policy)
    del policy
    torch.cuda.empty_cache()
    policy = build(folder, **kind)
    views = dict(policy.parameters)
    for step in range(STEPS):
        update(policy)
        if step == 1:
            out |= measure(policy)
        policy.memory.offload(OFFLOAD_PARTS)
        taken = torch.full(
            (40_000_000,), 7.0, device="cuda"
        )  # the memory that has become free belongs to others
        policy.memory.load(OFFLOAD_PARTS)
        del taken
    policy.memory.use(*OFFLOAD_PARTS)
    out["weights"], out["states"] = weights_and_states(policy)
    out["same_views"] = all(
        policy.parameters[name] is view and view.data_ptr() == parameter.data_ptr()
        for (name, view), parameter in zip(
            views.items(), dict(policy.named_parameters()).values(), strict=True
        )
    )
    return out


def measure(policy: Policy) -> dict:
    out = {
        "freed": {},
        "back": {},
        "allocator": {},
        "promised": {part: policy.memory.resident_bytes(part) for part in OFFLOAD_PARTS},
    }
    for part in OFFLOAD_PARTS:
        before, allocated = requested_bytes(), torch.cuda.memory_allocated()
        policy.memory.offload([part])
        away, out["allocator"][part] = requested_bytes(), allocated - torch.cuda.memory_allocated()
        policy.memory.load([part])
        out["freed"][part], out["back"][part] = before - away, requested_bytes() - away
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second on the stream that computes
    policy.memory.offload(OFFLOAD_PARTS)
    out["host_did_not_wait"] = not torch.cuda.current_stream().query()
    policy.memory.load(OFFLOAD_PARTS)
    torch.cuda.synchronize()
    out["copy_s"] = policy.memory.take_copy_seconds()
    return out


def requested_bytes() -> int:
    """Return what has been asked of the allocator and not been given back.

    It takes a block that a copy reads back once the copy is over, and looks when the next tensor is made."""
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def hybrid(folder: Path) -> dict:
    plain, offloaded = build(folder, bf16=True), build(folder, bf16=True, optimizer_cpu_offload=True)
    start = {name: weight.float().clone() for name, weight in plain.parameters.items()}
    for _ in range(STEPS):
        update(plain)
        update(offloaded)
    adams = [
        part.optimizer for part in getattr(offloaded.optimizer, "chained_optimizers", [offloaded.optimizer])
    ]
    masters = [[state["master_param"] for state in adam.state.values()] for adam in adams]
    differences = [
        (a.float() - b.float()).abs().flatten()
        for a, b in zip(plain.parameters.values(), offloaded.parameters.values(), strict=True)
    ]
    return {
        "state_devices": sorted({master.device.type for of_one in masters for master in of_one}),
        "difference": torch.cat(differences).mean().item(),
        "moved": max((plain.parameters[name].float() - start[name]).abs().max().item() for name in start),
    }


def main(folder: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    create_groups(MESH)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    report = {
        "fp32": compare(folder),
        "bf16": compare(folder, bf16=True),
        "plain_adam": compare(folder, use_distributed_optimizer=False),
        "hybrid": hybrid(folder),
    }
    (folder / "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

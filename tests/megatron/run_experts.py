"""Run under torchrun with 2 ranks: one update of a mixture of experts with balancing losses, in every layout. Writes gradients as
Hugging Face folders and metrics as JSON for test_experts.py.

    torchrun --nproc-per-node 2 tests/megatron/run_experts.py OUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from expert_cases import BALANCES, COEFF, LAYOUTS, MAX_TOKENS, TEMPERATURE, Z_COEFF, make_batch, micro_batches

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig, MoEConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.transfer import load_hf, save_hf
from megarl.workers.worker import join_world


class Held(Policy):
    """A policy that keeps its gradients instead of making a step."""

    def step(self) -> dict[str, float]:
        self.gradients = {name: p.main_grad.view(p.shape[0], -1).clone() for name, p in self.model.named_parameters()}
        return {}


def check(folder: Path, name: str, balance: str) -> list[dict[str, float]]:
    """Gradients to a folder; metrics of this rank of two updates, which are the same as no step was made."""
    count, flags = LAYOUTS[name]
    parallel = ParallelConfig(**flags)
    mesh = MeshSpec(tuple(range(count)), tp=parallel.tensor_model_parallel_size, pp=parallel.pipeline_model_parallel_size,
                    ep=parallel.expert_model_parallel_size, etp=parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size)
    create_groups(mesh)
    if dist.get_rank() >= count:
        return []
    shape = ModelShape.load(folder)
    experts = MoEConfig(moe_router_load_balancing_type=balance, moe_aux_loss_coeff=COEFF if balance != "none" else 0.0,
                        moe_z_loss_coeff=Z_COEFF if balance != "none" else 0.0)
    policy = Held(shape, mesh, ModelConfig(model=str(folder)), parallel, OptimizerConfig(use_distributed_optimizer=False), experts=experts)
    atlases = megatron_atlases(shape, mesh)
    load_hf(folder, atlases[dist.get_rank()], policy.parameters)
    batch = make_batch(shape.vocab_size)
    num_tokens = int(batch.response_mask.sum())
    micros = micro_batches(batch, mesh.dp, MAX_TOKENS)[policy.groups.dp.rank()]

    def loss(micro, log_probs, entropy, rows):
        value = -(log_probs * micro.column("advantages")[rows]).sum() / num_tokens
        return value, {"loss": value.detach()}

    metrics = []
    for _ in range(2):
        metrics.append(policy.update(micros, loss, TEMPERATURE))
        policy.log_probs(micros, TEMPERATURE)  # a pass without gradients between them must leave nothing behind
    save_hf(folder.with_name(f"{name}_{balance}"), folder, shape, atlases, policy.gradients)
    return metrics


def main(out: Path) -> None:
    join_world(60)
    report = {f"{name}/{balance}": check(out / "model", name, balance) for name in LAYOUTS for balance in BALANCES}
    (out / f"report_{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

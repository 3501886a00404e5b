"""Run under torchrun with 2 ranks: updates of a mixture of experts, with balancing losses and with replay, in
layouts. Writes gradients as Hugging Face folders and metrics as JSON for test_experts.py.

    torchrun --nproc-per-node 2 tests/megatron/run_experts.py OUT_FOLDER one/none ep2/aux_loss ep2/policy
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from expert_cases import (
    BALANCES,
    COEFF,
    LAYOUTS,
    MAX_TOKENS,
    TEMPERATURE,
    Z_COEFF,
    engine_choices,
    make_batch,
    micro_batches,
)
from layouts import MODELS

from megarl.batch import Batch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import megatron_mesh
from megarl.config.schema import ModelConfig, MoEConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.hf_weights import load_hf, save_hf
from megarl.workers.worker import join_world


class Held(Policy):
    """A policy that keeps its gradients instead of making a step."""

    def step(self, check: object = None) -> dict[str, float]:
        self.gradients = {
            name: p.main_grad.view(p.shape[0], -1).clone() for name, p in self.named_parameters()
        }
        return {}


def build(folder: Path, name: str, experts: MoEConfig) -> tuple[Held, dict] | None:
    """The policy and the atlases of its ranks, if this is one of them. Collective over the world."""
    count, flags = LAYOUTS[name]
    parallel = ParallelConfig(**flags)
    mesh = megatron_mesh(tuple(range(count)), parallel)
    create_groups(mesh)
    if dist.get_rank() >= count:
        return None
    shape = ModelShape.load(folder)
    policy = Held(
        shape,
        mesh,
        ModelConfig(model=str(folder)),
        parallel,
        OptimizerConfig(use_distributed_optimizer=False),
        experts=experts,
    )
    atlases = megatron_atlases(shape, mesh)
    load_hf(folder, atlases[dist.get_rank()], policy.parameters)
    return policy, atlases


def loss_of(batch: Batch):
    num_tokens = int(batch.response_mask.sum())

    def loss(micro, log_probs, entropy, rows):
        value = -(log_probs * micro.column("advantages")[rows].to(log_probs.device)).sum() / num_tokens
        return value, {"loss": value.detach()}

    return loss


def check_balance(folder: Path, name: str, balance: str) -> list[dict[str, float]]:
    """Gradients to a folder; metrics of this rank of two updates, which are the same as no step was made."""
    built = build(
        folder,
        name,
        MoEConfig()
        if balance == "none"
        else MoEConfig(
            moe_router_load_balancing_type=balance, moe_aux_loss_coeff=COEFF, moe_z_loss_coeff=Z_COEFF
        ),
    )
    if built is None:
        return []
    policy, atlases = built
    batch = make_batch(policy.shape.vocab_size)
    micros, loss = micro_batches(batch, policy.mesh.dp, MAX_TOKENS)[policy.groups.dp.rank()], loss_of(batch)
    metrics = [policy.update(micros, loss, TEMPERATURE)]
    policy.log_probs(micros, TEMPERATURE)  # a pass without gradients between them must leave nothing behind
    metrics.append(policy.update(micros, loss, TEMPERATURE))
    save_hf(folder.with_name(f"{name}_{balance}"), folder, policy.shape, atlases, policy.gradients)
    return metrics


def check_replay(folder: Path, name: str, source: str) -> list[dict[str, float]]:
    """Record with the weights in `model`. Metrics of two updates: with these, and with those in `moved`,
    whose gradients go to a folder."""
    built = build(folder, name, MoEConfig(moe_routing_replay=source))
    if built is None:
        return []
    policy, atlases = built
    batch = make_batch(policy.shape.vocab_size)
    if source == "engine":
        batch.routed_experts = engine_choices(batch)
    micros, loss = micro_batches(batch, policy.mesh.dp, MAX_TOKENS)[policy.groups.dp.rank()], loss_of(batch)
    log_probs = policy.log_probs(micros, TEMPERATURE)
    if log_probs is not None:
        for micro, values in zip(micros, log_probs, strict=True):
            micro.batch.old_log_probs = micro.batch.scatter(values)

    def compared(micro, log_probs, entropy, rows):
        value, metrics = loss(micro, log_probs, entropy, rows)
        old = micro.column("old_log_probs")[rows].to(log_probs.device)
        ratio = (log_probs.detach() - old).exp()
        return value, metrics | {
            "ratio_deviation_max": (ratio - 1).abs().max() if len(ratio) else torch.zeros(())
        }

    metrics = [policy.update(micros, compared, TEMPERATURE)]
    load_hf(folder.with_name("moved"), atlases[dist.get_rank()], policy.parameters)
    metrics.append(policy.update(micros, compared, TEMPERATURE))
    save_hf(folder.with_name(f"{name}_{source}"), folder, policy.shape, atlases, policy.gradients)
    return metrics


class OwnChoice:
    """The experts that DeepSeek's routers would choose for the tokens of a forward pass, from what goes into
    them, in float64.

    One token at a time, as the papers say it (arXiv:2405.04434, 2.1.3; arXiv:2412.19437, 2.1.2)."""

    def __init__(self, policy: Policy) -> None:
        self.shape, self.inputs = policy.shape, []
        for router in policy.routing._all:
            router.register_forward_pre_hook(
                lambda router, args: self.inputs.append((router, args[0].detach()))
            )

    def take(self) -> list[set[int]]:
        """Of every router and token since it was asked last."""
        chosen = [
            self._choose(token, router)
            for router, hidden in self.inputs
            for token in hidden.flatten(0, -2).double() @ router.weight.detach().double().t()
        ]
        self.inputs.clear()
        return chosen

    def _choose(self, logits: torch.Tensor, router) -> set[int]:
        shape, is_third = self.shape, self.shape.corrects_scores
        scores = (logits.sigmoid() + router.expert_bias.double() if is_third else logits.softmax(0)).tolist()
        size, best = len(scores) // shape.moe_router_num_groups, 2 if is_third else 1
        groups = [range(i * size, (i + 1) * size) for i in range(shape.moe_router_num_groups)]
        groups.sort(key=lambda group: -sum(sorted((scores[e] for e in group), reverse=True)[:best]))
        eligible = [e for group in groups[: shape.moe_router_group_topk] for e in group]
        return set(sorted(eligible, key=lambda e: -scores[e])[: shape.moe_router_topk])


def check_deepseek(out: Path, model: str) -> list[float]:
    """moe/replay_changed of three updates, each followed by what it must be: routers as recorded, moved, with
    other corrections."""
    folder = out / model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    mesh, parallel = megatron_mesh((0,), ParallelConfig()), ParallelConfig()
    policy = Held(
        ModelShape.load(folder),
        mesh,
        ModelConfig(model=str(folder)),
        parallel,
        OptimizerConfig(use_distributed_optimizer=False),
        experts=MoEConfig(moe_routing_replay="policy"),
    )
    generator, found = torch.Generator().manual_seed(7), []
    for name, parameter in policy.parameters.items():
        scale = 0.3 if name.endswith("expert_bias") else 0.1
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + ("norm" in name))
    batch = make_batch(policy.shape.vocab_size)
    micros, own = micro_batches(batch, 1, MAX_TOKENS)[0], OwnChoice(policy)
    policy.log_probs(micros, TEMPERATURE)
    recorded = own.take()
    for part, scale in (("", 0.0), ("router.weight", 0.05), ("router.expert_bias", 0.3)):
        for name, parameter in policy.parameters.items():
            if part and name.endswith(part):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device) * scale)
        metrics, now = policy.update(micros, loss_of(batch), TEMPERATURE), own.take()
        changed = sum(len(new - old) for old, new in zip(recorded, now, strict=True)) / sum(
            map(len, recorded)
        )
        found += [metrics["moe/replay_changed"], changed]
    return found


def main(out: Path, *cases: str) -> None:
    join_world(60)
    create_groups(megatron_mesh((0,), ParallelConfig()))
    report = {}
    for case in cases:
        name, _, what = case.partition("/")
        report[case] = (check_balance if what in BALANCES else check_replay)(out / "model", name, what)
    if dist.get_rank() == 0:
        report |= {model: check_deepseek(out, model) for model in ("deepseek_v2", "deepseek_v3")}
    (out / f"report_{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

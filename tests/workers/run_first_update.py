"""Run as two processes: what the check of a step's first update finds, in every layout and with each fault of
test_first_update.py.

    run_first_update.py FOLDER RANK DATA [faults] [LAYOUT ...]

FOLDER/report_<rank>.json: of each layout the metrics of a second step, or the error; of each fault the error,
and whether the weights are as before."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from role_steps import WORLD_SIZE, Step, build, main, make_rows

from megarl.kernels import aggregate
from megarl.workers.actor import ActorRole
from megarl.workers.worker import build_roles

ALONE = "--algorithm grpo --actor-lr 1e-2 --actor-ranks 0-1 --rollout-ranks 0-1"
PPO = "--algorithm ppo --actor-lr 1e-2 --critic-lr 1e-2 --rollout-ranks 0-1 --num-epochs 2"
CORRECTIONS = "--tis-clip 2 --tis-level sequence --mis-level geometric --mis-low 0.7 --mis-high 1.5"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LAYOUTS = {
    "dp2": PPO,
    "dp2_dr_grpo_entropy": f"{ALONE} --loss-aggregation dr-grpo --entropy-coef 0.01 --tis-clip 0.5",
    "dp2_cispo_sequences": f"{ALONE} --policy-loss cispo --loss-aggregation seq-mean-token-sum "
    "--kl-mode loss --kl-coef 0.1 --kl-estimator k1",
    **{
        f"{layout}_{loss}": f"{ALONE} {sizes} --policy-loss {loss} {CORRECTIONS}"
        for loss in ("gspo", "gmpo", "dppo-tv", "sapo")
        for layout, sizes in (("dp2", ""), ("cp2", "--context-parallel-size 2"))
    },
    "dp2_early_stop": f"{ALONE} --num-epochs 5 --early-stop-kl 1e-6",
    "cp2_early_stop": f"{ALONE} --num-epochs 5 --early-stop-kl 1e-6 --context-parallel-size 2",
    "dp2_distributed_overlap": f"{PPO} --use-distributed-optimizer --overlap-grad-reduce",
    "dp2_fsdp": f"{PPO} --use-megatron-fsdp",
    "dp2_offload": f"{PPO} --offload parameters gradients optimizer --no-reshard-alias",
    "dp2_lora": f"{PPO} --lora-rank 4 --kl-mode loss --kl-coef 0.1",
    "dp2_bf16": f"{PPO} --bf16",
    "tp2": f"{PPO} --tensor-model-parallel-size 2",
    "tp2_sp_recompute": f"{PPO} --tensor-model-parallel-size 2 --sequence-parallel {RECOMPUTE}",
    "tp2_bf16": f"{PPO} --tensor-model-parallel-size 2 --bf16",
    "pp2": f"{PPO} --pipeline-model-parallel-size 2",
    "cp2": f"{PPO} --context-parallel-size 2",
    "cp2_bf16_recompute": f"{PPO} --context-parallel-size 2 --bf16 {RECOMPUTE}",
    "experts": "moe " + ALONE,
    "experts_ep2_replay": f"moe {PPO} --expert-model-parallel-size 2 --moe-routing-replay policy "
    "--moe-aux-loss-coeff 1e-3 "
    "--moe-router-load-balancing-type global_aux_loss",
    "experts_ep2_bf16": f"moe {PPO} --expert-model-parallel-size 2 --bf16",
}


class Planted:
    """Faults, each in the roles of this rank; they change what the product code computes and nothing that the
    check itself computes."""

    def __init__(self, roles: dict) -> None:
        self.actor, self.critic = roles["actor"], roles["critic"]
        self.undo = []

    def patch(self, owner, name: str, planted) -> None:
        original = getattr(owner, name)
        setattr(owner, name, planted(original))
        self.undo.append(lambda: setattr(owner, name, original))

    def update_has_another_temperature(self) -> None:
        self.patch(
            self.actor.model,
            "update",
            lambda update: (
                lambda micros, loss, temperature, *rest: update(micros, loss, 1.5 * temperature, *rest)
            ),
        )

    def temperature_off_by_a_bit(self) -> None:
        self.patch(
            self.actor.model,
            "update",
            lambda update: lambda micros, loss, t, *rest: update(micros, loss, t * (1 + 1e-6), *rest),
        )

    def change_weights(self, model) -> None:
        weight = next(iter(model.parameters.values()))
        before = weight.clone()
        weight.mul_(1.001)
        self.undo.append(lambda: weight.copy_(before))

    def weights_changed_in_between(self) -> None:
        self.change_weights(self.actor.model)

    def critic_weights_changed_in_between(self) -> None:
        self.change_weights(self.critic.model)

    def local(self, mini_batch, role):
        batch, mine = role.shard.batch, mini_batch.samples_of(role.model.groups.dp.rank())
        part = batch.select_samples(mine)
        return replace(mini_batch, num_tokens=int(part.response_mask.sum()), num_sequences=len(mine))

    def policy_loss_divided_by_local_counts(self) -> None:
        self.patch(
            self.actor,
            "_update_once",
            lambda once: lambda mini, *rest: once(self.local(mini, self.actor), *rest),
        )

    def value_loss_divided_by_local_counts(self) -> None:
        self.patch(
            self.critic,
            "_update_once",
            lambda once: lambda mini, *rest: once(self.local(mini, self.critic), *rest),
        )

    def weights_of_the_micro_batch(self) -> None:
        def planted(weights):
            return lambda mode, lengths, *counts: weights(mode, lengths, max(len(lengths), 1), *counts[1:])

        self.patch(aggregate, "token_weights", planted)

    def gradients_averaged_over_ranks(self) -> None:
        for group in self.actor.model.ddp[0].bucket_groups:
            for bucket in group.buckets:
                self.patch(bucket, "gradient_scaling_factor", lambda _: 0.5)

    def value_loss_divided_by_micro_batches(self) -> None:
        self.patch(self.critic.model.config, "calculate_per_token_loss", lambda _: False)

    def policy_loss_divided_by_micro_batches(self) -> None:
        self.patch(self.actor.model.config, "calculate_per_token_loss", lambda _: False)


FAULTS = [
    name for name in vars(Planted) if name[0] != "_" and name not in ("patch", "local", "change_weights")
]


def run_layout(name: str, folder: Path, data: Path) -> dict | str:
    flags, has_experts = LAYOUTS[name].removeprefix("moe "), LAYOUTS[name].startswith("moe ")
    try:
        roles, meshes = build(
            flags + " --random-init" * has_experts, folder / "moe" if has_experts else data, folder / name
        )
        for step in (1, 2):
            metrics = Step(roles, meshes, make_rows(step), seed=step).learn()
        return metrics
    except Exception as error:  # the same on every rank, or the other one waits until its time is up
        return f"{type(error).__name__}: {error}"


def actor_without_optimizer(trained: ActorRole) -> tuple[str, bool]:
    """Return what an evaluation's actor has of an optimizer, and whether its weights are those of a trained
    one."""
    actor = build_roles(trained.config, WORLD_SIZE)["actor"]
    actor.setup(is_trained=False)
    weights, others = actor.model.weights, trained.model.weights
    are_equal = weights.keys() == others.keys() and all(torch.equal(weights[n], others[n]) for n in weights)
    return str((actor.model.optimizer, actor.model.ddp)), are_equal


def run_faults(folder: Path, data: Path) -> dict[str, tuple[str, bool]]:
    roles, meshes = build(PPO, data, folder / "faults")
    evaluated = actor_without_optimizer(roles["actor"])
    Step(roles, meshes, make_rows(1), seed=1).learn()
    found = {"without_optimizer": evaluated}
    for name in FAULTS:
        Step(roles, meshes, make_rows(2), seed=2).prepare()
        planted, role = Planted(roles), roles["critic" if "value" in name or "critic" in name else "actor"]
        getattr(planted, name)()
        before = [weight.clone() for weight in role.model.parameters.values()]
        try:
            message = f"nothing: {role.update()}"
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        found[name] = message, all(map(torch.equal, before, role.model.parameters.values()))
        for undo in planted.undo:
            undo()
    Step(roles, meshes, make_rows(2), seed=2).prepare()
    shard = roles["actor"].shard
    shard.set_column("old_log_probs", shard.batch.old_log_probs - 0.01 * shard.batch.response_mask)
    found["somebody_elses_log_probs"] = roles["actor"].update()["policy/ratio_deviation_max"], None
    return found


def run(folder: Path, data: Path) -> None:
    if dist.get_rank() == 0:
        shutil.copytree(data, folder / "moe")
        config = json.loads((data / "model/config.json").read_text())
        (folder / "moe/model/config.json").write_text(json.dumps(config | EXPERTS))
    dist.barrier()
    report = {
        name: run_faults(folder, data) if name == "faults" else run_layout(name, folder, data)
        for name in sys.argv[4:]
    }
    (folder / f"report_{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(run)

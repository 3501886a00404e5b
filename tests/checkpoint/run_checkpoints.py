"""Run under torchrun with 2 ranks: save in one layout, load in others. Writes a JSON report for
test_layouts.py.

torchrun --nproc-per-node 2 tests/checkpoint/run_checkpoints.py OUT_FOLDER
"""

from __future__ import annotations

import errno
import json
import os
import sys
import unittest.mock
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, MEGATRON_CASES
from tiny import make_folder

from megarl.algorithms import REGISTRY
from megarl.batch import Batch, MicroBatch
from megarl.checkpoint import manifest as manifest_module
from megarl.checkpoint import save as save_module
from megarl.checkpoint.load import Checkpoint
from megarl.checkpoint.manifest import CheckpointError, CheckpointIOError
from megarl.checkpoint.rectangles import whole
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.config.mesh import MeshSpec
from megarl.config.role_sections import OFFLOAD_PARTS
from megarl.config.schema import LoRAConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.initialize import initial_adapters
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.megatron.trained_model import TrainedModel
from megarl.megatron.training_state import load_checkpoint, save_checkpoint, verify_checkpoint
from megarl.megatron.value_model import ValueModel
from megarl.packing import Sample, plan_mini_batches
from megarl.reshard.lora_atlas import adapter_sizes, with_adapters
from megarl.reshard.hf_weights import load_hf
from megarl.workers.megatron_role import megatron_atlases
from megarl.workers.worker import build_roles, join_world

with cpu_megatron():
    from megatron.core import dist_checkpointing

# Name -> (mesh, parallel flags)
LAYOUTS = {
    "one": (MeshSpec((0,)), ParallelConfig()),
    "dp2": (MeshSpec((0, 1)), ParallelConfig()),
    "tp2": (MeshSpec((0, 1), tp=2), ParallelConfig(tensor_model_parallel_size=2)),
    "tp2_sp": (MeshSpec((0, 1), tp=2), ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2_stacked": (
        MeshSpec((0, 1), tp=2),
        ParallelConfig(tensor_model_parallel_size=2, qkv_layout="stacked"),
    ),
    "pp2": (MeshSpec((0, 1), pp=2), ParallelConfig(pipeline_model_parallel_size=2)),
    "pp2_vpp2": (
        MeshSpec((0, 1), pp=2, vpp=2),
        ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    ),
    "cp2": (MeshSpec((0, 1), cp=2), ParallelConfig(context_parallel_size=2)),
    "ep2": (MeshSpec((0, 1), ep=2), ParallelConfig(expert_model_parallel_size=2)),
    "tp2_sp_ep2": (
        MeshSpec((0, 1), tp=2, ep=2, etp=1),
        ParallelConfig(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=1,
        ),
    ),
}


class Job:
    """A model of one case in one layout, and what trains it."""

    def __init__(self, folder: Path, layout: str) -> None:
        name, *flags = layout.split("+")  # tp2_sp+sharded+bf16
        self.mesh, parallel = LAYOUTS[name]
        self.critic = folder.name.endswith("_critic")
        shape = ModelShape.load(folder, value_head=self.critic)
        model = ModelConfig(model=str(folder), bf16="bf16" in flags)
        # eps 1e-5: with 1e-8 a gradient that is only rounding noise becomes an update as large as the
        # learning rate
        optimizer = OptimizerConfig(
            lr=1e-3,
            lr_warmup_iters=3,
            lr_decay_style="linear",
            adam_eps=1e-5,
            use_distributed_optimizer=not {"sharded", "fsdp"}.isdisjoint(flags),
            use_megatron_fsdp="fsdp" in flags,
        )
        lora = LoRAConfig(lora_rank=4) if folder.name.endswith("_lora") else None
        self.model: TrainedModel = (ValueModel if self.critic else Policy)(
            shape, self.mesh, model, parallel, optimizer, train_iters=10, lora=lora
        )
        self.atlas = megatron_atlases(shape, self.mesh, parallel)[dist.get_rank()]
        load_hf(folder, self.atlas, self.model.parameters, shape)
        if lora is not None:
            self.atlas = with_adapters(self.atlas, lora)
            initial_adapters(self.atlas, adapter_sizes(shape, lora), self.model.parameters, seed=0)
        self.model.parameters_changed()
        self.batch = make_batch()

    def train(self, steps: int) -> list[dict[str, float]]:
        """Returns what this rank contributes: the loss, and the gradient's norm on one rank."""
        batch, model, out = self.batch, self.model, []
        num_tokens = int(batch.response_mask.sum())
        samples = [
            Sample(i, int(n), int(r))
            for i, (n, r) in enumerate(zip(batch.lengths, batch.response_lengths, strict=True))
        ]
        (mini,) = plan_mini_batches(samples, len(samples), {}, self.mesh.dp, 40, 64, "a")
        micros = [
            MicroBatch.of(batch.select_samples(ids)) for ids in mini.micro_batches[model.groups.dp.rank()]
        ]

        def policy_loss(micro, log_probs, entropy, rows):
            value = -(log_probs * micro.column("advantages")[rows]).sum() / num_tokens
            return value, {"loss": value.detach()}

        def value_loss(micro, values):
            value = 0.5 * (values - micro.column("advantages")).square().sum() / num_tokens
            return value, {"loss": value.detach()}

        for _ in range(steps):
            model.advance_schedule()
            out.append(
                model.update(micros, value_loss) if self.critic else model.update(micros, policy_loss, 1.0)
            )
        return out

    def weights(self) -> list[torch.Tensor]:
        return [values.clone() for values in self.model.parameters.values()]


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)

    def ids(low: int, high: int) -> list[int]:
        return torch.randint(
            0, 128, (int(torch.randint(low, high, (1,), generator=generator)),), generator=generator
        ).tolist()

    batch = Batch.from_samples(list(range(6)), [ids(1, 9) for _ in range(6)], [ids(1, 12) for _ in range(6)])
    batch.advantages = torch.randn(len(batch.tokens), generator=generator) * batch.response_mask
    return batch


def different_tensors(one: Path, other: Path) -> tuple[int, list[str]]:
    """How many tensors a checkpoint has, and which are not bit-equal in another."""
    a, b = Checkpoint(one), Checkpoint(other)
    assert {k: sorted(v) for k, v in a.manifest.tensors.items()} == {
        k: sorted(v) for k, v in b.manifest.tensors.items()
    }
    names = [(kind, name) for kind in a.manifest.tensors for name in a.tensors(kind)]
    return len(names), [
        f"{kind} {name}"
        for kind, name in names
        if not same_bits(
            a.read(kind, name, box := whole(a.tensors(kind)[name].shape)), b.read(kind, name, box)
        )
    ]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def run_case(out: Path, family: str, writer: str, readers: tuple[str, ...]) -> dict:
    """On the ranks of the case's layouts; what differs is empty or [] if all is well."""
    folder, saved = out / family, out / f"{family}-{writer}"
    report: dict[str, object] = {}
    job = Job(folder, writer)
    job.train(2)
    save_checkpoint(saved, job.model, job.atlas, {"cursor": 7})
    report["uninterrupted"], after = job.train(2), job.weights()
    same = Job(folder, writer)
    report["state"] = load_checkpoint(saved, same.model, same.atlas)
    report["resumed"] = same.train(2)
    report["weights_equal"] = all(map(same_bits, after, same.weights()))
    for reader in readers:
        again = out / f"{family}-{writer}-{reader}"
        if dist.get_rank() in LAYOUTS[reader.split("+")[0]][0].ranks:
            other = Job(folder, reader)
            other.train(1)  # so that what is loaded is not what is there already
            load_checkpoint(saved, other.model, other.atlas)
            save_checkpoint(again, other.model, other.atlas)
            report[reader] = {"next": other.train(2)}
            if dist.get_rank() == 0:
                report[reader]["count"], report[reader]["different"] = different_tensors(saved, again)
    return report


def refusals(out: Path) -> dict[str, list[str]]:
    """What each rank hears when one rank's part goes wrong; nobody waits for anybody."""
    saved, job = out / "qwen3-dp2+sharded", Job(out / "qwen3", "tp2")
    before, messages = job.weights(), {}

    def attempt(name: str, work) -> None:
        try:
            work()
        except CheckpointError as error:
            messages[name] = str(error)

    attempt("exists", lambda: save_checkpoint(saved, job.model, job.atlas))
    attempt("missing", lambda: load_checkpoint(out / "nothing", job.model, job.atlas))
    critic = Job(out / "qwen3_critic", "tp2")
    attempt("other model", lambda: load_checkpoint(saved, critic.model, critic.atlas))
    if dist.get_rank() == 0:  # the last byte of the second rank's moments
        with open(saved / "exp_avg-00001.safetensors", "r+b") as file:
            file.seek(-1, 2)
            byte = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    attempt("flipped", lambda: load_checkpoint(saved, job.model, job.atlas))
    messages["untouched"] = str(all(map(same_bits, before, job.weights())))
    attempt("weights are whole", lambda: load_checkpoint(saved, job.model, job.atlas, weights_only=True))
    messages["loaded"] = str(not all(map(same_bits, before, job.weights())))
    with unittest.mock.patch.object(
        save_module, "write_tensors", full_disk if dist.get_rank() == 1 else save_module.write_tensors
    ):
        attempt("disk full", lambda: save_checkpoint(out / "full", job.model, job.atlas))
    with unittest.mock.patch.object(
        manifest_module, "file_digest", unreadable if dist.get_rank() == 1 else manifest_module.file_digest
    ):
        try:
            verify_checkpoint(out / "qwen3-tp2_sp", job.model, job.atlas)
        except CheckpointIOError as error:
            messages["I/O error"] = str(error)
    dist.barrier()
    messages["left"] = str(sorted(p.name for p in out.glob("*full*")))
    return messages


def load_weights_only(out: Path) -> list[str]:
    """Into a bf16 model with masters: what of the weights is no longer what was saved. [] on all ranks but
    the first."""
    saved, again, job = (
        out / "qwen2-dp2+sharded+bf16",
        out / "weights_only",
        Job(out / "qwen2", "tp2_sp+bf16"),
    )
    load_checkpoint(saved, job.model, job.atlas, weights_only=True)
    save_checkpoint(again, job.model, job.atlas)
    return (
        [name for name in different_tensors(saved, again)[1] if name.startswith("weights")]
        if dist.get_rank() == 0
        else []
    )


def full_disk(path: Path, entries: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def unreadable(path: Path) -> str:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def run_roles(out: Path, *flags: str) -> dict[str, bool]:
    """Actor and critic of a job, in layouts of their own, with everything in host memory between calls: is
    what was saved there again?"""
    lora = "-".join(flags)
    config = load_config(
        [
            "--algorithm",
            "ppo",
            "--model",
            str(out / "qwen3"),
            "--train-data",
            str(out / "report_0.json"),
            "--save",
            str(out / "run"),
            "--train-iters",
            "2",
            "--nproc-per-node",
            "2",
            "--tensor-model-parallel-size",
            "2",
            "--critic-tensor-model-parallel-size",
            "1",
            "--actor-offload",
            *OFFLOAD_PARTS,
            "--critic-offload",
            *OFFLOAD_PARTS,
            *flags,
        ],
        REGISTRY,
    )
    roles, report = build_roles(config, world_size=2), {}
    for name in ("actor", "critic"):
        roles[name].setup()
    for name in ("actor", "critic"):
        role, folder = roles[name], str(out / f"role_{name}{lora}")
        role.save_checkpoint(folder, {"step": 3})
        before = [values.clone() for values in role.model.parameters.values()]
        for values in role.model.parameters.values():
            values.add_(1.0)
        state = role.load_checkpoint(folder)
        report[name] = state == {"step": 3} and all(map(same_bits, before, role.model.parameters.values()))
    return report


def save_by_megatron(folder: Path, job: Job) -> None:
    """As Megatron-LM does with --ckpt-format torch_dist. Collective over the world."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    # the process that Megatron starts for a queue would import all of this file first
    with cpu_megatron(), unittest.mock.patch.object(sys.modules["__main__"], "__file__", None):
        metadata = {"dp_cp_group": job.model.groups.dp_cp}
        (model,) = job.model.chunks
        dist_checkpointing.save(
            {"model": model.sharded_state_dict(metadata=metadata), "iteration": 3}, str(folder)
        )


def main(out: Path) -> None:
    join_world(60)
    rank, report = dist.get_rank(), {}
    for mesh, _ in LAYOUTS.values():
        create_groups(mesh)
    if rank == 0:
        for family in dict.fromkeys(family for family, _, _ in CASES):
            make_folder(out / family, family.removesuffix("_critic").removesuffix("_lora"))
    dist.barrier()
    for family, writer, readers in CASES:
        report[f"{family}/{writer}"] = run_case(out, family, writer, readers)
        dist.barrier()
    report["refusals"] = refusals(out)
    report["roles"], report["adapted roles"] = run_roles(out), run_roles(out, "--lora-rank", "4")
    report["weights_only"] = load_weights_only(out)
    for family, layout in MEGATRON_CASES:
        save_by_megatron(out / f"megatron-{family}-{layout}", Job(out / family, layout))
    (out / f"report_{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

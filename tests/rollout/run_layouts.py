"""Run under torchrun: Megatron in one layout after the other feeds an engine, which is compared with
transformers after each of three syncs of changing weights. Engines are in the ranks' processes, or rank 0 has
one in processes of its own. Each rank writes what it saw; test_layouts.py judges.

    torchrun --nproc-per-node 2 tests/rollout/run_layouts.py FOLDER JOB       a job of layouts.JOBS"""

from __future__ import annotations

import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import jobs
from layouts import JOBS, SYNCS

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig, ParallelConfig, TrainConfig
from megarl.megatron import mesh as megatron_mesh
from megarl.megatron.policy import Policy
from megarl.reshard.atlas import Atlas
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.sync import WeightSync, sync_plan
from megarl.reshard.hf_weights import load_hf
from megarl.rollout.engine import Response, RolloutEngine
from megarl.rollout.out_of_process import OutOfProcessEngine

TWO, FOUR = (0, 1), (0, 1, 2, 3)
MESHES = {
    "one": MeshSpec((0,)),
    "tp2": MeshSpec(TWO, tp=2),
    "pp2": MeshSpec(TWO, pp=2),
    "pp2_vpp2": MeshSpec(TWO, pp=2, vpp=2),
    "ep2": MeshSpec(TWO, ep=2),
    "tp2_sp": MeshSpec(TWO, tp=2),
    "tp2_sp_ep2": MeshSpec(TWO, tp=2, ep=2, etp=1),
    "tp4": MeshSpec(FOUR, tp=4),
    "tp2_pp2": MeshSpec(FOUR, tp=2, pp=2),
    "tp4_sp": MeshSpec(FOUR, tp=4),
    "ep4": MeshSpec(FOUR, ep=4),
    "tp2_sp_ep2_etp2": MeshSpec(FOUR, tp=2, ep=2, etp=2),
    "pp2_ep2": MeshSpec(FOUR, pp=2, ep=2),
}
STD = 0.08
"""Of the weights: log-probs of about 5 and a rounding error of 2e-6, so that 1e-5 is a limit and wrong
weights are far above it."""


def parallel(layout: str, mesh: MeshSpec) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=mesh.vpp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.etp,
        sequence_parallel="sp" in layout,
    )


class OutsideEngine:
    """Rank 0's engine in processes of its own, and on every rank what it asks of a source: the methods of
    RolloutEngine."""

    def __init__(
        self,
        config: TrainConfig,
        shape: ModelShape,
        sources: dict[int, Atlas],
        parameters: dict[str, torch.Tensor],
    ) -> None:
        self.config, self.shape, self.ranks = config, shape, range(config.rollout.tensor_parallel_size)
        self.engine = (
            OutOfProcessEngine(config, shape, self.ranks, self.ranks) if dist.get_rank() == 0 else None
        )
        self.generation = 0
        self.connect(sources, parameters)

    def connect(self, sources: dict[int, Atlas], parameters: dict[str, torch.Tensor]) -> None:
        self.sender = None
        if self.engine is not None:
            self.engine.connect(sources, parameters)
        elif parameters:
            timeout_s, backend = self.config.reshard.reshard_timeout_s, self.config.rollout.backend
            plan, speakers = sync_plan(
                self.shape, sources, self.ranks, len(self.ranks), timeout_s, backend=backend
            )
            self.sender = WeightSync(
                plan, dist.get_rank(), speakers, parameters, None, self.config.reshard, self.generation
            )
        self.generation += 1

    def sync(self, version: int) -> None:
        if self.engine is not None:
            self.engine.sync(version)
        elif self.sender is not None:
            self.sender.begin(version)
            self.sender.finish()

    def generate(self, prompts: list[list[int]], seeds: list[int], temperature: float) -> list[Response]:
        return (
            self.engine.generate(prompts, seeds, temperature=temperature) if self.engine is not None else []
        )

    def shutdown(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        dist.barrier()
        dist.destroy_process_group()


def gap(reference, asked: list[list[int]], responses: list[Response]) -> list[float]:
    """One number, or none without responses."""
    return [jobs.largest_gap(reference, asked, responses)] if responses else []


def check(folder: Path, name: str, tp_size: int, layouts: tuple[str, ...], store: str, where: str) -> dict:
    """Layout -> largest error of a log-prob after each sync, on this rank; and what it would be with the
    weights of another sync."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    references = [jobs.reference_model(name, seed, STD) for seed in range(SYNCS)]
    if rank == 0:
        for seed, reference in enumerate(references):
            reference.save_pretrained(folder / f"{name}-{seed}")
    dist.barrier()
    model, policies, sources = folder / f"{name}-0", {}, {}
    shape = ModelShape.load(model)
    for layout in layouts:
        mesh = MESHES[layout]
        megatron_mesh.create_groups(mesh)
        if rank in mesh.ranks:
            policies[layout] = Policy(shape, mesh, ModelConfig(model=str(model)), parallel(layout, mesh))
        sources[layout] = (
            megatron_atlases(shape, mesh),
            policies[layout].parameters if layout in policies else {},
        )
    # Shared memory where layouts agree: what vLLM makes of a latent layer is then of other memory.
    config = jobs.job(
        model,
        alias=name in jobs.UNTABLED,
        tensor_parallel_size=tp_size,
        engine_args={"worker_cls": "tableless.TablelessWorker"} if "without" in where else {},
        backend="transformers" if "transformers" in where else "vllm",
    )
    if where.startswith("in-process"):
        engine = RolloutEngine(config, shape, range(world_size), *sources[layouts[0]])
    else:
        engine = OutsideEngine(config, shape, *sources[layouts[0]])
    asked, errors = jobs.prompts(6, shape.vocab_size, seed=rank // tp_size), {}
    for layout in layouts:
        atlases, parameters = sources[layout]
        engine.connect(atlases, parameters)
        errors[layout] = []
        for seed, reference in enumerate(references):
            if parameters:
                load_hf(folder / f"{name}-{seed}", atlases[rank], parameters, shape)
            dist.barrier()
            engine.sync(seed + 1)
            responses = engine.generate(asked, list(range(len(asked))), temperature=1.0)
            errors[layout] += gap(reference, asked, responses)
    errors["of other weights"] = gap(references[0], asked, responses)
    engine.shutdown()
    if dist.is_initialized():  # vLLM in this process has destroyed the world
        dist.destroy_process_group()
    megatron_mesh._groups.clear()  # they died with the world
    megatron_mesh._second_channels.clear()
    return errors


def main() -> None:
    folder, (_, where, combinations), report = Path(sys.argv[1]), JOBS[sys.argv[2]], {}
    torch.set_num_threads(1)
    if "without" in where:
        importlib.import_module("tableless")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(HERE), os.environ.get("PYTHONPATH", "")]
        )  # for the engine's processes
    for number, ((name, tp_size), layouts) in enumerate(combinations.items()):
        report[f"{name} {tp_size}"] = check(folder, name, tp_size, layouts, f"{folder}/store-{number}", where)
    (folder / f"report-{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()

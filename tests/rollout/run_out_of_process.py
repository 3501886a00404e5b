"""One of two ranks. Rank 0 drives an engine in processes of its own; the weights come from rank 1, or from
shards on both ranks.

    python tests/rollout/run_out_of_process.py FOLDER RANK PORT FAMILY TP faults|crash

Writes FOLDER/<family>-<tp>-<rank>.json. "faults": what is planted by faulty_worker.py. "crash": rank 0 leaves
while the engine is up."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "reshard")]
import cuts
import jobs

from megarl.config.hf_config import ModelShape
from megarl.config.schema import ReshardConfig
from megarl.reshard.megatron_atlas import megatron_atlas
from megarl.reshard.sync import SyncError, WeightSync, sync_plan
from megarl.rollout.out_of_process import OutOfProcessEngine

KEYS = [1000 + i for i in range(16)]


class Trainer:
    """Megatron's shards of a reference model on one or both ranks, and the sync with the engine of rank 0."""

    def __init__(
        self, rank: int, shape: ModelShape, name: str, engine: OutOfProcessEngine | None, rollout_ranks: range
    ) -> None:
        self.rank, self.shape, self.name, self.engine, self.rollout_ranks = (
            rank,
            shape,
            name,
            engine,
            rollout_ranks,
        )
        self.generation, self.version, self.seed = 0, 0, 0
        self.shard: dict[str, torch.Tensor] = {}

    def connect(self, tp: int, **options) -> None:
        """TP=1: all on rank 1. TP=2: on both."""
        of_rank = {1: 0} if tp == 1 else {0: 0, 1: 1}
        self.tp, self.tp_rank = tp, of_rank.get(self.rank)
        atlases = {rank: megatron_atlas(self.shape, tp, tp_rank) for rank, tp_rank in of_rank.items()}
        self.shard = self.weights(self.seed)
        options = ReshardConfig(**options)
        if self.engine is not None:
            self.engine.options = options
            self.engine.connect(atlases, self.shard)
        else:
            plan, speakers = sync_plan(self.shape, atlases, self.rollout_ranks, len(self.rollout_ranks), 60.0)
            self.sync_part = WeightSync(plan, self.rank, speakers, self.shard, None, options, self.generation)
        self.generation += 1

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """This rank's shard of the reference model of that seed: views of one buffer, as Megatron's."""
        if self.tp_rank is None:
            return {}
        full = {
            name: tensor.squeeze(1) if tensor.shape[1] == 1 else tensor
            for name, tensor in jobs.full_tensors(jobs.reference_model(self.name, seed)).items()
        }
        shard = cuts.megatron_shard(self.shape, full, self.tp, self.tp_rank)
        buffer = torch.cat([tensor.flatten() for tensor in shard.values()])
        parts = buffer.split([tensor.numel() for tensor in shard.values()])
        return {name: part.view(tensor.shape) for (name, tensor), part in zip(shard.items(), parts)}

    def train(self) -> None:
        """New weights, in place."""
        self.seed += 1
        self.version += 1
        for name, tensor in self.weights(self.seed).items():
            self.shard[name].copy_(tensor)

    def begin(self) -> None:
        (self.sync_part.begin if self.engine is None else self.engine.begin_sync)(self.version)

    def finish(self) -> None:
        (self.sync_part.finish if self.engine is None else self.engine.finish_sync)()

    def sync(self) -> str:
        """What the SyncError said, or ''."""
        try:
            self.begin()
            self.finish()
        except SyncError as error:
            return str(error)
        return ""


class Story:
    """What both ranks do together. Rank 0 also generates and writes down how far it is from transformers."""

    def __init__(self, trainer: Trainer, faults: Path) -> None:
        self.trainer, self.engine, self.faults, self.report = trainer, trainer.engine, faults, {}
        self.asked = jobs.prompts(16, jobs.CONFIGS[trainer.name].vocab_size)

    def plant(self, *faults: str) -> None:
        if self.engine is not None:
            self.faults.write_text("\n".join(faults))
        dist.barrier()

    def generate(self) -> list:
        return self.engine.generate(self.asked, KEYS, temperature=1.3) if self.engine is not None else []

    def gap(self) -> float:
        """How far log-probs and draws are from their references."""
        if self.engine is None:
            return 0.0
        reference, responses = jobs.reference_model(self.trainer.name, self.trainer.seed), self.generate()
        return max(
            jobs.largest_gap(reference, self.asked, responses, 1.3),
            jobs.largest_shortfall(reference, self.asked, KEYS, responses, 1.3),
        )

    def three_syncs(self, name: str) -> None:
        gaps = []
        for _ in range(3):
            self.trainer.train()
            assert self.trainer.sync() == ""
            gaps.append(self.gap())
        self.report[name] = gaps
        if self.engine is not None:
            transports = sorted(set(self.engine._weight_sync._transports.values()))
            self.report[f"{name} by"] = [
                transports,
                self.engine.version,
                self.engine.inference.llm.get_weight_version(),
                self.engine.bytes_per_sync,
            ]

    def layouts(self) -> None:
        for name, tp, options in (
            ("TP1", 1, {}),
            ("TP2", 2, {"check_weight_sync": True}),
            ("messages", 1, {"reshard_transport": "messages"}),
        ):
            self.trainer.connect(tp, **options)
            self.three_syncs(name)
        self.trainer.connect(2, reshard_transport="messages")
        self.trainer.train()
        self.report["impossible"] = self.trainer.sync()  # half of the source is rank 0 itself

    def with_faults(self) -> None:
        trainer, report = self.trainer, self.report
        trainer.connect(2, check_weight_sync=True, reshard_timeout_s=20)
        trainer.train()
        report["after an error"] = [trainer.sync(), self.gap()]
        before = self.generate()
        self.plant("slow")
        trainer.train()
        trainer.begin()
        report["same while copying"] = self.generate() == before
        trainer.finish()
        report["gap of the slow one"] = self.gap()
        before, version = self.generate(), self.engine and self.engine.version
        self.plant("flip")
        trainer.train()
        report["flipped"] = trainer.sync()
        report["same after the flip"] = self.generate() == before and (
            self.engine is None or self.engine.version == version
        )
        report["repeated"] = [trainer.sync(), self.gap()]
        before = self.generate()
        trainer.connect(2, reshard_timeout_s=1.5)
        trainer.train()
        report["late"] = trainer.sync() if trainer.rank == 0 else ""
        report["same after the late one"] = self.generate() == before
        trainer.connect(2, reshard_timeout_s=20)
        report["in time again"] = [trainer.sync(), self.gap()]
        self.plant("kill")
        trainer.train()
        report["killed"] = trainer.sync()
        if self.engine is not None:
            try:
                self.generate()
            except RuntimeError as error:
                report["generate after the kill"] = str(error)


def children() -> list[int]:
    """Pids of this process's descendants."""
    parent_of = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent_of[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = [], [os.getpid()]
    while new:
        new = [pid for pid, parent in parent_of.items() if parent in new]
        found += new
    return found


def main() -> None:
    folder, rank, port, name, tp, end = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
        int(sys.argv[5]),
        sys.argv[6],
    )
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        FAULTS=str(folder / f"faults-{name}-{tp}"),
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), os.environ.get("PYTHONPATH", "")]
    )  # the engine's process finds faulty_worker
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    if rank == 0:
        jobs.make_folder(folder / name, name)
    dist.barrier()
    shape = ModelShape.load(folder / name)
    config = jobs.job(
        folder / name,
        tensor_parallel_size=tp,
        block_size=32,
        sampling={"stop_token_ids": jobs.STOP_IDS},
        engine_args={"worker_cls": "faulty_worker.FaultyWorker"},
    )
    engine = OutOfProcessEngine(config, shape, range(tp), range(tp)) if rank == 0 else None
    story = Story(Trainer(rank, shape, name, engine, range(tp)), Path(os.environ["FAULTS"]))
    story.layouts()
    if end == "faults":
        story.with_faults()
    story.report |= {"pid": os.getpid(), "children": children()}
    (folder / f"{name}-{tp}-{rank}.json").write_text(json.dumps(story.report))
    dist.barrier()
    if end == "crash":
        os._exit(7)
    if engine is not None:
        engine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One of two ranks, on GPUs if there are any: shards of Megatron TP=2 become two TP=1 engines, one per rank,
by a WeightSync.

python tests/reshard/run_sync.py FOLDER RANK"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from cuts import hf_model, make_shape, megatron_shard

from megarl.config.schema import ReshardConfig
from megarl.reshard.destination import Destination
from megarl.reshard.megatron_atlas import megatron_atlas
from megarl.reshard.plan import make_plan
from megarl.reshard.receiver import tensors_of
from megarl.reshard.sync import SyncError, WeightSync
from megarl.reshard.vllm_atlas import vllm_atlas

SHAPE = make_shape("qwen3", layers=2, vocab=61)
PLAN = make_plan(
    {r: megatron_atlas(SHAPE, 2, r) for r in (0, 1)}, {r: vllm_atlas(SHAPE, 1, 0) for r in (0, 1)}
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Engine:
    """As an in-process engine receives."""

    process, device = None, DEVICE

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self.rank, self.version, self.fault = rank, None, lambda: None
        atlas = vllm_atlas(SHAPE, 1, 0)
        self.tensors = {
            rank: {name: torch.zeros(p.rows, p.cols, dtype=dtype, device=DEVICE) for name, p in atlas.items()}
        }
        self.destination = Destination(rank, PLAN.copies_to(rank), self.tensors[rank])

    def begin(self, version, arrivals, pulls, messages) -> None:
        self.version, self.arrivals = None, arrivals[self.rank]
        for source, pull in pulls.get(self.rank, {}).items():
            self.destination.pull_from(source, tensors_of(pull), pull[1])
        messages()
        self.destination.pull()
        self.fault()

    def verify(self, timeout_s: float) -> str | None:
        return self.destination.difference(self.arrivals)

    def commit(self, version: int) -> None:
        self.version = version

    def give_up(self) -> None:
        pass


def refusal(call) -> str:
    try:
        call()
    except SyncError as error:
        return str(error)
    return ""


def sync(part: WeightSync, version: int) -> str:
    def both() -> None:
        part.begin(version)
        part.finish()

    return refusal(both)


def shards(rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Views of one buffer, as Megatron's."""
    shard = megatron_shard(SHAPE, hf_model(SHAPE, seed=seed), 2, rank)
    buffer = torch.cat([tensor.flatten() for tensor in shard.values()]).to(DEVICE)
    parts = buffer.split([tensor.numel() for tensor in shard.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(shard.items(), parts)}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    out, held = {"device": DEVICE}, shards(rank, seed=0)
    for generation, (name, transport, dtype) in enumerate(
        [("auto", "auto", torch.float32), ("messages", "messages", torch.bfloat16)]
    ):
        engine = Engine(rank, dtype)
        part = WeightSync(
            PLAN,
            rank,
            {0: 0, 1: 1},
            held,
            engine,
            ReshardConfig(reshard_transport=transport, check_weight_sync=True),
            generation,
        )
        out[name] = {"transports": None}
        for version in (1, 2):
            for key, tensor in shards(rank, seed=version).items():
                held[key].copy_(tensor)
            out[name][version] = (
                sync(part, version),
                engine.version,
                {key: tensor.clone().cpu() for key, tensor in engine.tensors[rank].items()},
            )
        out[name]["transports"] = dict(part._transports)

    engine = Engine(rank, torch.float32)
    part = WeightSync(PLAN, rank, {0: 0, 1: 1}, held, engine, ReshardConfig(reshard_timeout_s=2.0), 2)
    sync(part, 1)
    for key in held:  # the weights move: another address, another buffer
        held[key] = held[key].clone() + 1
    out["moved"] = sync(part, 2), engine.tensors[rank]["model.embed_tokens.weight"][:61].clone().cpu()
    if rank == 1:
        engine.fault = lambda: engine.tensors[1]["model.layers.1.mlp.down_proj.weight"].add_(1.0)
    out["flipped"] = sync(part, 3), engine.version
    engine.fault = lambda: None
    out["again"] = sync(part, 4), engine.version

    def fail() -> None:
        raise OSError("no more memory")

    if rank == 0:
        engine.fault = fail
    out["failed"] = sync(part, 5), engine.version
    engine.fault = lambda: None
    out["other version"] = sync(part, 6 + rank), engine.version
    other = ReshardConfig(reshard_transport="shared-memory" if DEVICE == "cuda" else "cuda-ipc")
    part = WeightSync(PLAN, rank, {0: 0, 1: 1}, held, engine, other, 3)
    out["impossible"] = sync(part, 8)
    part = WeightSync(PLAN, rank, {0: 0, 1: 1}, held, engine, ReshardConfig(reshard_timeout_s=1.0), 4)
    sync(part, 9)
    dist.barrier()
    start = time.monotonic()
    if rank == 0:  # rank 1 does not come
        out["late"] = sync(part, 10), engine.version, time.monotonic() - start
    torch.save(out, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Three gloo ranks move weights between layouts. Each rank writes what it got; test_transfer.py compares.

python tests/reshard/run_transfer.py FOLDER RANK"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from cuts import hf_model, make_shape, megatron_shard

from megarl.reshard import transfer as transfer_module
from megarl.reshard.megatron_atlas import megatron_atlas
from megarl.reshard.plan import make_plan
from megarl.reshard.hf_weights import save_hf
from megarl.reshard.transfer import Transfer
from megarl.reshard.vllm_atlas import vllm_atlas

SHAPE = make_shape("qwen3", layers=3, vocab=61)
TIED = make_shape("qwen2", layers=3, vocab=61, tied=True)


def empty(atlas, dtype):
    return {name: torch.full((p.rows, p.cols), 7.0, dtype=dtype) for name, p in atlas.items()}


def tensor_parallel_to_bf16_engines(rank: int) -> dict:
    """Megatron TP=2 on ranks 0 and 1, fp32 -> engines on ranks 0 and 2, bf16. Two versions through the same
    buffers."""
    sources = {r: megatron_atlas(SHAPE, 2, r) for r in (0, 1)}
    destinations = {r: vllm_atlas(SHAPE, 1, 0) for r in (0, 2)}
    held = megatron_shard(SHAPE, hf_model(SHAPE, seed=1), 2, rank) if rank < 2 else {}
    held = {name: tensor.clone() for name, tensor in held.items()}
    got = empty(destinations[rank], torch.bfloat16) if rank != 1 else {}
    dtypes = dict.fromkeys(destinations[0], torch.bfloat16)
    transfer = Transfer(make_plan(sources, destinations), rank, held, got, dtypes)
    out = {"bytes": transfer.run(), "first": {name: tensor.clone() for name, tensor in got.items()}}
    if rank < 2:
        for name, tensor in megatron_shard(SHAPE, hf_model(SHAPE, seed=2), 2, rank).items():
            held[name].copy_(tensor)
    transfer.run()
    return out | {"second": got}


def pipeline_to_tensor_parallel(rank: int) -> dict:
    """Megatron PP=3 -> one engine with TP=2 on ranks 1 and 2; columns and rows are cut, every rank sends.
    Tied embeddings."""
    sources = {r: megatron_atlas(TIED, 1, 0, 3, r) for r in range(3)}
    destinations = {r: vllm_atlas(TIED, 2, r - 1) for r in (1, 2)}
    got = empty(destinations[rank], torch.float32) if rank else {}
    Transfer(
        make_plan(sources, destinations),
        rank,
        megatron_shard(TIED, hf_model(TIED, seed=3), 1, 0, 3, rank),
        got,
        dict.fromkeys(destinations[1], torch.float32),
    ).run()
    return {"got": got}


def only_two_ranks(rank: int) -> dict:
    """A plan that does not touch rank 1: it takes no part."""
    if rank == 1:
        return {}
    plan = make_plan({0: megatron_atlas(SHAPE, 1, 0)}, {2: vllm_atlas(SHAPE, 1, 0)})
    wanted = vllm_atlas(SHAPE, 1, 0)
    got = empty(wanted, torch.float32) if rank == 2 else {}
    held = megatron_shard(SHAPE, hf_model(SHAPE, seed=4), 1, 0) if rank == 0 else {}
    Transfer(plan, rank, held, got, dict.fromkeys(wanted, torch.float32)).run()
    return {"got": got}


def in_many_rounds(rank: int) -> dict:
    """The first two again with so little staging that rectangles are cut, and some of their parts travel in
    place."""
    enough, transfer_module.STAGING_BYTES = transfer_module.STAGING_BYTES, 3 << 12
    out = {
        scenario.__name__: scenario(rank)
        for scenario in (tensor_parallel_to_bf16_engines, pipeline_to_tensor_parallel)
    }
    transfer_module.STAGING_BYTES = enough
    return out


def export(rank: int, folder: Path) -> dict:
    """PP=3 -> a Hugging Face folder in several files; then again in bf16 over it, from TP=2 on ranks 1 and
    2."""
    stages = {r: megatron_atlas(TIED, 1, 0, 3, r) for r in range(3)}
    shard = megatron_shard(TIED, hf_model(TIED, seed=5), 1, 0, 3, rank)
    save_hf(folder / "fp32", folder / "source", TIED, stages, shard, max_shard_bytes=20_000)
    if rank == 0:
        save_hf(
            folder / "bf16",
            folder / "source",
            TIED,
            {0: megatron_atlas(TIED, 1, 0)},
            megatron_shard(TIED, hf_model(TIED, seed=5), 1, 0),
        )
    else:
        halves = {r: megatron_atlas(TIED, 2, r - 1) for r in (1, 2)}
        shard = megatron_shard(TIED, hf_model(TIED, seed=6), 2, rank - 1)
        save_hf(folder / "bf16_tp2", folder / "source", TIED, halves, shard, dtype=torch.bfloat16)
    return {}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3, timeout=timedelta(seconds=30)
    )
    scenarios = (tensor_parallel_to_bf16_engines, pipeline_to_tensor_parallel, only_two_ranks, in_many_rounds)
    out = {scenario.__name__: scenario(rank) for scenario in scenarios}
    export(rank, folder)
    torch.save(out, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

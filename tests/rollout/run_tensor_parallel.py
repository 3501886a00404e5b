"""One of two ranks of a job: an engine with TP=2, fed from Megatron shards with TP=2. Two such jobs run side
by side.

    python tests/rollout/run_tensor_parallel.py FOLDER RANK PORT OWN_NAME OTHER_NAME

The job called "clean" aliases the weights; the one called "crash" copies them, and ends without shutdown."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "reshard")]
import cuts
import jobs

from megarl.config.hf_config import ModelShape
from megarl.reshard.megatron_atlas import megatron_atlas
from megarl.rollout.draws import draw_key
from megarl.rollout.engine import RolloutEngine

KEYS = [draw_key(7, "train", visit, index) for visit in range(8) for index in range(2)]  # as in run_engine.py


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.05)


def full_model(reference) -> dict[str, torch.Tensor]:
    return {
        name: tensor.squeeze(1) if tensor.shape[1] == 1 else tensor
        for name, tensor in jobs.full_tensors(reference).items()
    }


def main() -> None:
    folder, rank, port, own, other = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
        sys.argv[5],
    )
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    if rank == 0:
        jobs.make_folder(folder / own, "qwen3")
    dist.barrier()
    shape = ModelShape.load(folder / own)
    config = jobs.job(
        folder / own, tensor_parallel_size=2, alias=own == "clean", sampling={"stop_token_ids": jobs.STOP_IDS}
    )
    reference = jobs.reference_model("qwen3", seed=1)
    shard = {
        name: tensor.clone()
        for name, tensor in cuts.megatron_shard(shape, full_model(reference), 2, rank).items()
    }
    engine = RolloutEngine(config, shape, [0, 1], {r: megatron_atlas(shape, 2, r) for r in (0, 1)}, shard)
    report = {"bytes": [engine.sync(1)]}
    torch.manual_seed(rank)  # the ranks' own generators differ: sampling must not use them
    asked = jobs.prompts(16, 150)
    sampled = engine.generate(asked, KEYS, temperature=0.7)
    report |= {
        "sampled": sampled,
        "gap": jobs.largest_gap(reference, asked, sampled, 0.7),
        "pid": os.getpid(),
        "shared_memory": sorted(path.name for path in Path("/dev/shm").glob("megarl-*")),
    }
    for seed in (2, 3):  # the trainer writes into its shards, as an optimizer does
        reference = jobs.reference_model("qwen3", seed)
        for name, tensor in cuts.megatron_shard(shape, full_model(reference), 2, rank).items():
            shard[name].copy_(tensor)
        report["bytes"].append(engine.sync(seed))
        report["gap"] = max(
            report["gap"],
            jobs.largest_gap(reference, asked, engine.generate(asked, KEYS, temperature=0.7), 0.7),
        )
    (folder / f"{own}-{rank}.json").write_text(json.dumps(report))
    for name in (own, other):  # until here both jobs have an engine
        for r in (0, 1):
            wait_for(folder / f"{name}-{r}.json")
    if own == "crash":
        os._exit(7)
    engine.shutdown()


if __name__ == "__main__":
    main()

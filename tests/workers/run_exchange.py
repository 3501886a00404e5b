"""Three gloo ranks exchange samples. Each writes what it got, as lists of bit patterns; test_exchange.py compares.

    python tests/workers/run_exchange.py FOLDER RANK"""

from __future__ import annotations

import json
import random
import struct
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megarl.algorithms import GRPO
from megarl.batch import Batch
from megarl.packing import Move, Sample, plan_exchange
from megarl.workers.actor import ActorRole
from megarl.workers.data_plane import DataPlane
from megarl.workers.exchange import exchange

WORLD_SIZE, NUM_SAMPLES = 3, 12


def sample(sample_id: int) -> tuple[list[int], list[int], list[float]]:
    """Prompt, response, log-probs of sample `sample_id`: odd lengths, so that no column of a message is aligned by luck; tokens of
    any size, and log-probs whose bits a conversion or a sum would change."""
    rng = random.Random(sample_id)
    prompt, response = ([rng.randrange(2**40) for _ in range(rng.randint(1, 9))] for _ in range(2))
    log_probs = [struct.unpack("f", struct.pack("I", rng.randrange(0x80000000, 0xC2000000)))[0] for _ in response]  # -0.0 to -32, denormals too
    return prompt, response, log_probs


def described(holders: dict[int, tuple[int, ...]]) -> list[Sample]:
    return [Sample(i, len(sample(i)[0]) + len(sample(i)[1]), len(sample(i)[1]), ranks) for i, ranks in holders.items()]


def packed(sample_ids: list[int]) -> Batch | None:
    return Batch.from_samples(sample_ids, *map(list, zip(*map(sample, sample_ids), strict=True))) if sample_ids else None


def bits(batch: Batch) -> dict[str, list[int]]:
    return {"sample_ids": batch.sample_ids.tolist(), "tokens": batch.tokens.tolist(), "cu_seqlens": batch.cu_seqlens.tolist(),
            "mask": batch.response_mask.tolist(), "log_probs": batch.rollout_log_probs.view(torch.int32).tolist()}  # fmt: skip


def run(rank: int, holders: dict[int, tuple[int, ...]], wanted: dict[int, list[int]]) -> dict[str, list[int]]:
    """Samples lie where `holders` says, `wanted` are the samples of each rank in order. What this rank gets."""
    samples = described(holders)
    destinations = {i: tuple(r for r in range(WORLD_SIZE) if i in wanted[r]) for i in holders}
    held = packed([i for i, ranks in holders.items() if rank in ranks])
    return bits(exchange(held, plan_exchange(samples, destinations), samples, wanted[rank]))


def every_rank_to_every_rank(rank: int) -> dict:
    order = random.Random(7).sample(range(NUM_SAMPLES), NUM_SAMPLES)
    return run(rank, {i: (i % 3,) for i in range(NUM_SAMPLES)}, {r: order[4 * r : 4 * r + 4] for r in range(3)})


def tensor_parallel_block(rank: int) -> dict:
    """Ranks 0 and 1 hold the same samples and train on the same ones; rank 2 holds nothing and trains on the rest."""
    return run(rank, {i: (0, 1) for i in range(6)}, {0: [4, 1], 1: [4, 1], 2: [5, 0, 3, 2]})


def rank_without_samples(rank: int) -> dict:
    """Rank 2 neither holds nor wants anything, rank 1 gives all away."""
    return run(rank, {0: (0,), 1: (1,)}, {0: [1, 0], 1: [], 2: []})


def nothing_to_move(rank: int) -> dict:
    """Only rank 0 calls: it would wait for ever if it sent or expected a message."""
    if rank != 0:
        return {}
    wanted = [3, 0, 2]
    return bits(exchange(packed([0, 1, 2, 3]), [Move(9, 1, 2)], described({i: (0,) for i in range(4)}), wanted))


def kl_of_all_samples(rank: int) -> dict:
    """The KL of each sample, taken off its reward, reaches the group statistics of every rank, also of rank 2, which has no sample."""
    mine, everyone = {0: [3, 1], 1: [0, 2], 2: []}[rank], [0, 1, 2, 3]
    batch = exchange(packed(mine), [], [], mine)
    batch.old_log_probs, batch.ref_log_probs = batch.rollout_log_probs, 2 * batch.rollout_log_probs
    actor = object.__new__(ActorRole)  # without a model: only its data and its group take part
    algorithm = GRPO(kl_mode="reward", kl_coef=1.0, kl_estimator="k1", normalize_advantages_by_std=False)
    actor.config, actor.plane = SimpleNamespace(algorithm=algorithm), DataPlane(batch=batch)
    actor.policy = SimpleNamespace(device=torch.device("cpu"), groups=SimpleNamespace(dp=None), reports=True)
    metrics = actor.advantages(everyone, [0] * 4, [0.0] * 4)
    return {"advantages": batch.advantages[batch.cu_seqlens[1:] - 1].tolist(), "metrics": metrics}


SCENARIOS = (every_rank_to_every_rank, tensor_parallel_block, rank_without_samples, nothing_to_move, kl_of_all_samples)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=30))
    report = {scenario.__name__: scenario(rank) for scenario in SCENARIOS}
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

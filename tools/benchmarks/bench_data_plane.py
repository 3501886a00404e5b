"""Measure the data plane at size: planning and dispatch of a step for two meshes, the driver's memory, and
columns between two meshes over gloo.

python tools/benchmarks/bench_data_plane.py --json out.json [--samples 4096] [--length 8192] [--repeats 5]
                                            [--exchange-samples 256] [--skip-exchange]

planning   plan_mini_batches for an actor with dp 8 and a critic with dp 3, in one process without tensors, as in the driver
dispatch   the commands of both `distribute` calls: encoded and signed, and on one rank verified and decoded
memory     growth of the driver's peak resident set over all of this, and over plans of one sixteenth of the tokens per sample
route      what one rank needs to work out its messages (the busiest of a job of 64 ranks)
exchange   four processes: rollouts -> actor TP2 DP2 and critic DP4, then columns from the critic to the actor. Beside it, in the same
           processes, as many bytes in one contiguous message per pair: what gloo alone takes. Taking turns;
           medians"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from megarl.config.mesh import MeshSpec, replicas, shard_keys
from megarl.packing import Sample, preferred_ranks, plan_mini_batches, plan_route, ranks_of_samples
from megarl.workers.data import DataRole
from megarl.runtime.messages import (
    Call,
    decode_arguments,
    encode_arguments,
    read_command,
    signed_command,
)
from megarl.runtime.process import peak_rss_bytes
from megarl.workers.store import RolloutSample, RolloutBlock, SampleStore

HIDDEN_SIZE, MAX_TOKENS, GLOBAL_BATCH_SIZE = 4096, 16384, 1024
WORLD_SIZE = 4


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    report = {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "samples": arguments.samples,
        "length": arguments.length,
        "driver": driver_side(arguments),
    }
    if not arguments.skip_exchange:
        report["exchange"] = exchange_side(arguments)
    print(json.dumps(report, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument(
        "--length",
        type=int,
        default=8192,
        help="tokens of a sample: half of them have all, the others any number",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--exchange-samples",
        type=int,
        default=256,
        help="samples of --length tokens that move between processes",
    )
    parser.add_argument("--skip-exchange", action="store_true")
    return parser.parse_args()


def make_samples(count: int, length: int, engines: list[tuple[int, ...]]) -> list[Sample]:
    rng = random.Random(0)
    lengths = [length if rng.random() < 0.5 else rng.randint(length // 8, length) for _ in range(count)]
    return [Sample(i, n, n - n // 8, engines[i * len(engines) // count]) for i, n in enumerate(lengths)]


# The driver.


def driver_side(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure the driver for 11 ranks: actor dp 8 on 0-7, critic dp 3 on 8-10, engines on 0-7."""
    meshes = {"actor": MeshSpec(tuple(range(8))), "critic": MeshSpec((8, 9, 10))}
    engines = [(rank,) for rank in range(8)]
    small = make_samples(arguments.samples, arguments.length // 16, engines)
    plan_and_dispatch(small, meshes)  # what is allocated once
    before, samples = peak_rss_bytes(), make_samples(arguments.samples, arguments.length, engines)
    runs = [plan_and_dispatch(samples, meshes) for _ in range(arguments.repeats)]
    grown = peak_rss_bytes() - before
    result = {name: median(run[name] for run in runs) for name in runs[0]}
    return result | {
        "plan_and_dispatch_max_s": max(run["plan_and_dispatch_s"] for run in runs),
        "driver_memory_growth_bytes": grown,
        "tokens": sum(s.length for s in samples),
        "route_s": route_seconds(arguments),
    }


def plan_and_dispatch(samples: list[Sample], meshes: dict[str, MeshSpec]) -> dict[str, float]:
    start = time.perf_counter()
    plans = {
        key: plan_mini_batches(
            samples,
            GLOBAL_BATCH_SIZE,
            preferred_ranks(samples, replicas(mesh)),
            mesh.dp,
            MAX_TOKENS,
            HIDDEN_SIZE,
            "0/1",
        )
        for key, mesh in meshes.items()
    }
    planned, num_bytes = time.perf_counter(), 0
    for index, (key, plan) in enumerate(plans.items()):
        arguments = encode_arguments("data", "distribute", (key, samples, plan), {})
        call = Call("data", tuple(range(11)), "distribute", "step 1", arguments)
        message = signed_command(index, call)
        num_bytes += len(arguments)
        received = decode_arguments(
            DataRole.distribute.__get__(object()), read_command(index, message).arguments
        )
    assert received.args == (key, samples, plan) and not received.kwargs
    end = time.perf_counter()
    return {
        "planning_s": planned - start,
        "dispatch_s": end - planned,
        "plan_and_dispatch_s": end - start,
        "command_bytes": num_bytes,
    }


def route_seconds(arguments: argparse.Namespace) -> float:
    """Return the seconds to plan a rank's messages from engines of 8 ranks to an actor on 64 (TP 4, PP 2).

    Every sample goes to 8 ranks."""
    mesh = MeshSpec(tuple(range(64)), tp=4, pp=2)
    samples = make_samples(
        arguments.samples, arguments.length, [tuple(range(i, i + 8)) for i in range(0, 64, 8)]
    )
    plan = plan_mini_batches(samples, GLOBAL_BATCH_SIZE, {}, mesh.dp, MAX_TOKENS, HIDDEN_SIZE, "0/1")
    owners = {s.sample_id: s.owners for s in samples}
    seconds = []
    for rank in mesh.ranks[::8]:
        start = time.perf_counter()
        plan_route(rank, owners, ranks_of_samples(plan, replicas(mesh)))
        seconds.append(time.perf_counter() - start)
    return max(seconds)


# Four processes.


def exchange_side(arguments: argparse.Namespace) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=run_rank, args=(folder, rank, arguments)) for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
            raise RuntimeError(f"the exchange failed on ranks {failed}; the messages are above")
        return json.loads((Path(folder) / "result.json").read_text())


def run_rank(folder: str, rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=120),
    )
    everyone = tuple(range(WORLD_SIZE))
    meshes = {"actor": MeshSpec(everyone, tp=2), "critic": MeshSpec(everyone)}
    samples = make_samples(arguments.exchange_samples, arguments.length, [(r,) for r in everyone])
    plans = {
        key: plan_mini_batches(
            samples,
            len(samples),
            preferred_ranks(samples, replicas(mesh)),
            mesh.dp,
            MAX_TOKENS,
            HIDDEN_SIZE,
            "0/1",
        )
        for key, mesh in meshes.items()
    }
    vocab_sizes = dict.fromkeys(meshes, 3)  # prompts of token 1, responses of token 2
    role = DataRole(SampleStore(), meshes, shard_keys(meshes), vocab_sizes)
    rollouts = RolloutBlock(
        RolloutSample(
            s.sample_id,
            0,
            s.group,
            [s.version] * s.response_length,
            [1] * (s.length - s.response_length),
            [2] * s.response_length,
            [-1.0] * s.response_length,
        )
        for s in samples
        if rank in s.owners
    )
    role.store.source("train").add(rollouts)
    seconds: dict[str, list[float]] = {}
    num_bytes: dict[str, float] = {}

    def timed(name: str, call) -> None:
        dist.barrier()
        start = time.perf_counter()
        moved = call()
        dist.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        num_bytes[name] = moved

    timed("pack", lambda: float(len(rollouts.batch.tokens) * 13))
    for _ in range(arguments.repeats):
        for key, plan in plans.items():
            timed(
                f"distribute_{key}",
                lambda key=key, plan=plan: role.distribute(key, samples, plan)["batch/bytes_moved"],
            )
        batch = role.store.batch("critic").batch
        for column in ("values", "returns"):
            batch.set_column(column, torch.ones(len(batch.tokens)))
        timed(
            "exchange",
            lambda: role.exchange(["values", "returns"], "critic", "actor")["batch/bytes_exchanged"],
        )
        for name, pair in (("distribute_actor", (None, "actor")), ("exchange", ("critic", "actor"))):
            timed(
                f"gloo_{name}",
                lambda name=name, pair=pair: messages_alone(
                    rank, samples, plans, meshes, *pair, 13 if pair[0] is None else 8
                ),
            )
    write_result(folder, rank, samples, seconds, num_bytes)
    dist.barrier()
    dist.destroy_process_group()


def write_result(
    folder: str,
    rank: int,
    samples: list[Sample],
    seconds: dict[str, list[float]],
    num_bytes: dict[str, float],
) -> None:
    """Add up the bytes of all ranks, and write medians on rank 0. Collective."""
    total = torch.tensor(list(num_bytes.values()), dtype=torch.float64)
    dist.all_reduce(total)
    if rank == 0:
        result = {"samples": len(samples), "tokens": sum(s.length for s in samples)}
        for (name, taken), of_all in zip(seconds.items(), total.tolist(), strict=True):
            result |= {
                f"{name}_s": median(taken),
                f"{name}_bytes": of_all,
                f"{name}_gb_per_s": of_all / median(taken) / 1e9,
            }
        (Path(folder) / "result.json").write_text(json.dumps(result))


def messages_alone(
    rank: int,
    samples: list[Sample],
    plans: dict,
    meshes: dict[str, MeshSpec],
    source: str | None,
    destination: str,
    bytes_per_token: int,
) -> float:
    """Send contiguous messages of the sizes that the data plane sends.

    Returns: the bytes that this rank received."""
    owners = (
        {s.sample_id: s.owners for s in samples}
        if source is None
        else ranks_of_samples(plans[source], replicas(meshes[source], True))
    )
    route = plan_route(
        rank,
        owners,
        ranks_of_samples(plans[destination], replicas(meshes[destination], last_stage=source is not None)),
    )
    operations = []
    for peer in sorted({*route.outgoing, *route.incoming}):
        for operation, messages in ((dist.isend, route.outgoing), (dist.irecv, route.incoming)):
            if ids := messages.get(peer):
                size = sum(samples[i].length for i in ids) * bytes_per_token
                operations.append(dist.P2POp(operation, torch.ones(size, dtype=torch.uint8), peer))
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return float(sum(samples[i].length for ids in route.incoming.values() for i in ids) * bytes_per_token)


if __name__ == "__main__":
    main()

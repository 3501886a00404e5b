"""Measure whether slow tools of many episodes keep the engine waiting.

Plays --episodes episodes at once on one in-process engine. Each of an episode's turns ends in a tool call
that takes 0.1 to 5 s. The same turns are then sampled with tools that answer at once (engine only). README.md
says what is counted.

    python tools/benchmarks/bench_episodes.py --model runs/quickstart/sft_mixed/hf \\
        --data runs/quickstart/data/train.jsonl"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import select
import time
from pathlib import Path
from typing import Any

SHORTEST_S, LONGEST_S = 0.1, 5.0
MAX_TURNS = 6


def plan(index: int) -> list[float]:
    """Return the seconds of each tool call of an episode: 1 to 5 calls, log-uniform between 0.1 and 5 s."""
    rng = random.Random(index)
    low, high = math.log(SHORTEST_S), math.log(LONGEST_S)
    return [math.exp(rng.uniform(low, high)) for _ in range(rng.randint(1, MAX_TURNS - 1))]


class SlowTool:
    """The environment: waits as the plan of its row says, and says so."""

    async def reset(self, row):
        self.waits, self.scale = plan(row["extra_info"]["episode"]), row["extra_info"]["scale"]
        return row["prompt"]

    async def step(self, text):
        if not self.waits:
            return [], 1.0, True
        wait = self.waits.pop(0)
        await asyncio.sleep(wait * self.scale)
        return [{"role": "user", "content": f"{wait:.2f}"}], None, False


class Watched:
    """The engine with a record of every step: how many seats were taken, and whether a reply was waiting."""

    def __init__(self, engine: Any, pool: Any, seats: int) -> None:
        self._engine, self._pool, self._seats = engine, pool, seats
        self.num_steps = self.num_free = self.num_missed = self.num_running = self.running = 0
        self.engine_s = 0.0
        self.peak_running = 0

    def add(self, requests: list) -> None:
        self.running += len(requests)
        self._engine.add(requests)

    def step(self) -> None:
        self.num_steps += 1
        self.num_running += min(self.running, self._seats)
        self.peak_running = max(self.peak_running, self.running)
        if self.running < self._seats:
            self.num_free += 1
            self.num_missed += self._is_reply_waiting()
        started = time.perf_counter()
        self._engine.step()
        self.engine_s += time.perf_counter() - started

    def take(self) -> list:
        taken = self._engine.take()
        self.running -= len(taken)
        return taken

    def _is_reply_waiting(self) -> bool:
        poll = select.poll()
        for process in self._pool._processes:
            poll.register(process.fileno(), select.POLLIN)
        return bool(poll.poll(0))


def resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(field))
    return int(line.split()[1]) * 1024


def configuration(arguments: argparse.Namespace) -> Any:
    from megarl.algorithms import REGISTRY
    from megarl.config.loader import load_config

    flags = (
        f"--algorithm grpo --model {arguments.model} --train-data {arguments.data} --save unused "
        f"--train-iters 1 --env {Path(__file__).resolve()}:SlowTool --env-episodes-per-process {arguments.per_process} "
        f"--max-turns {MAX_TURNS} --max-prompt-length 64 --max-response-length {arguments.response_length} "
        f"--max-context-length 448 --rollout-max-num-seqs {arguments.seats}"
    )
    return load_config(flags.split(), REGISTRY)


def engine_of(config: Any, shape: Any) -> Any:
    """Start vLLM in this process, with the weights of --model."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megarl.reshard.atlas import hf_atlas
    from megarl.rollout.engine import RolloutEngine

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors: dict[str, Any] = {}
    for file in Path(config.model.model).glob("*.safetensors"):
        tensors |= load_file(file)
    engine = RolloutEngine(
        config, shape, [0], {0: hf_atlas(shape)}, {k: v.float() for k, v in tensors.items()}
    )
    engine.sync(1)
    return engine


def measure(config: Any, sampler: Any, watched: Watched, dataset: Any, scale: float, count: int) -> dict:
    """Play all episodes once, with the tools' times multiplied by `scale`."""
    from megarl.data.prompts import PromptDataset
    from megarl.rollout.draws import draw_key
    from megarl.workers.answer import Answer

    rows, answers = [], []
    for index in range(count):
        row = dataset[index % len(dataset)]
        rows.append(type(row)(index, row.data_source, row.messages, row.ground_truth))
        rows[-1].extra_info = {"episode": index, "scale": scale}
        answers.append(Answer(index, index, index // 8, [1], draw_key(0, "train", index // 8, index % 8)))
    watched.num_steps = watched.num_free = watched.num_missed = watched.num_running = watched.peak_running = 0
    watched.engine_s = 0.0
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    before, started, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    samples = sampler.sample(answers, PromptDataset(rows), temperature=1.0)
    seconds = time.perf_counter() - started
    print(f"{count} episodes, tools x {scale:g}: {seconds:.1f} s in {watched.num_steps} steps", flush=True)
    failed = [one.episode.failure for one in samples if one.episode.failure is not None]
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "engine_seconds": watched.engine_s,
        "steps": watched.num_steps,
        "steps_with_a_free_seat": watched.num_free,
        "steps_with_a_free_seat_and_a_waiting_reply": watched.num_missed,
        "seats_taken": watched.num_running / max(1, watched.num_steps),
        "peak_requests": watched.peak_running,
        "growth_bytes": resident("VmHWM") - before,
        "tokens": sum(len(one.response) - sum(end - begin for begin, end in one.holes) for one in samples),
        "turns": sum(one.episode.num_turns for one in samples),
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "tokens_of": [one.response for one in samples],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seats", type=int, default=256, help="--rollout-max-num-seqs")
    parser.add_argument("--per-process", type=int, default=16, help="--env-episodes-per-process")
    parser.add_argument("--response-length", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    from megarl.config.hf_config import ModelShape
    from megarl.data.prompts import PromptDataset
    from megarl.data.tokenizer import load_tokenizer
    from megarl.workers.episodes import EpisodeSampler

    config = configuration(arguments)
    shape, dataset = ModelShape.load(config.model.model), PromptDataset.load(arguments.data)
    engine = engine_of(config, shape)
    sampler = EpisodeSampler(config, shape, load_tokenizer(config.model.model, "--model"), engine)
    watched = Watched(engine, sampler.environments, arguments.seats)
    sampler._engine = watched
    results = []
    measure(config, sampler, watched, dataset, 0.0, min(arguments.episodes, 64))  # warms up
    for repeat in range(arguments.repeats):
        slow = measure(config, sampler, watched, dataset, 1.0, arguments.episodes)
        fast = measure(config, sampler, watched, dataset, 0.0, arguments.episodes)
        assert slow.pop("tokens_of") == fast.pop("tokens_of"), "the tokens depend on when the tools answer"
        longest = max(sum(plan(index)) for index in range(arguments.episodes))
        bound = max(fast["seconds"], longest)
        results.append({"tools": slow, "engine_only": fast, "longest_episode_s": longest})
        results[-1]["wall_ratio"] = slow["seconds"] / bound
        print(json.dumps(results[-1], indent=1), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    sampler.close()
    os._exit(0)  # vLLM's threads would be waited for


if __name__ == "__main__":
    main()

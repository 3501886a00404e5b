"""Steps of the real Megatron roles on two ranks, without engines and without a driver: for scripts that run
as two processes."""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.algorithms import REGISTRY
from megarl.config.check import check_job
from megarl.config.loader import load_config
from megarl.config.mesh import role_meshes, shard_keys
from megarl.invariants import digest
from megarl.metrics import combine
from megarl.packing import plan_mini_batches
from megarl.workers.store import RolloutBlock, RolloutSample
from megarl.workers.worker import build_roles

WORLD_SIZE, NUM_PROMPTS, GROUP, MINI_BATCH = 2, 4, 3, 6
MAX_TOKENS = 26  # of a micro-batch: some ranks have several, some an empty one
_FLAGS = f"""--train-iters 2 --num-prompts {NUM_PROMPTS} --num-samples-per-prompt {GROUP} --global-batch-size {MINI_BATCH} --clip-grad 1e9
    --max-prompt-length 16 --max-response-length 16 --max-tokens-per-micro-batch {MAX_TOKENS} --nproc-per-node {WORLD_SIZE}
    --reward-function '{__file__}:unused'"""


def make_rows(step: int) -> list[dict]:
    """The samples of a step: prompt, response, the engine's log-probs, reward."""
    rng = random.Random(step)
    rows = []
    for sample in range(NUM_PROMPTS * GROUP):
        response = [rng.randrange(5, 200) for _ in range(rng.randint(2, 14))]
        rows.append(
            dict(
                sample=sample,
                group=sample // GROUP,
                prompt=[rng.randrange(5, 200) for _ in range(rng.randint(2, 9))],
                response=response,
                rollout=[-5.0 - rng.random() for _ in response],
                reward=rng.uniform(-1, 1),
            )
        )
    return rows


def build(flags: str, data: Path, save: Path) -> tuple[dict, dict]:
    """(this rank's roles, set up; meshes of all roles) of a job with these flags. Collective."""
    arguments = [
        *shlex.split(_FLAGS),
        "--model",
        str(data / "model"),
        "--train-data",
        str(data / "train.jsonl"),
        *flags.split(),
    ]
    config = load_config([*arguments, "--save", str(save)], REGISTRY)
    check_job(config, WORLD_SIZE)
    roles, meshes = build_roles(config, WORLD_SIZE), role_meshes(config, WORLD_SIZE)
    for name in ("actor", "reference", "critic"):
        if name in roles:
            roles[name].setup()
    return roles, meshes


class Step:
    """Samples of a step, on the ranks that work on them.

    Args:
        roles: of this rank, by name.
        rows: see `make_rows`.
        seed: of the mini-batches.
        max_tokens: of a micro-batch."""

    def __init__(
        self, roles: dict, meshes: dict, rows: list[dict], seed: int, max_tokens: int = MAX_TOKENS
    ) -> None:
        self.roles, self.meshes, self.rows = roles, meshes, rows
        made = [
            RolloutSample(
                r["sample"],
                0,
                r["group"],
                r.get("versions", [0] * len(r["response"])),
                r["prompt"],
                r["response"],
                r["rollout"],
                digest=digest(r["prompt"], r["response"], r.get("holes", ())),
                holes=r.get("holes", ()),
                branch=r.get("branch", 0),
                num_branches=r.get("num_branches", 1),
            )
            for r in rows
        ]
        self.samples = samples = [rollout.record((rollout.sample_id % WORLD_SIZE,)) for rollout in made]
        rollouts = roles["data"].store.source("train")
        rollouts.release()
        rollouts.add(RolloutBlock([r for r in made if r.sample_id % WORLD_SIZE == dist.get_rank()]))
        self.key_of = shard_keys(meshes)
        for key in dict.fromkeys(self.key_of[role] for role in ("actor", "critic") if role in meshes):
            plan = plan_mini_batches(samples, MINI_BATCH, {}, meshes[key].dp, max_tokens, 64, seed=str(seed))
            roles["data"].distribute(key, samples, plan)
            self.plan = plan
            self.mini_batch_of = {
                s: i for i, m in enumerate(plan) for rank in range(meshes[key].dp) for s in m.samples_of(rank)
            }

    def call(self, role: str, method: str, *args) -> dict[str, float]:
        """Metrics of all ranks of the role together. Ranks without it have to call as well."""
        value = getattr(self.roles[role], method)(*args) if role in self.roles else None
        everyone: list = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, value)
        return combine(everyone)

    def exchange(self, column: str, source: str, destination: str) -> None:
        self.roles["data"].exchange([column], self.key_of[source], self.key_of[destination])

    def prepare(self) -> dict[str, float]:
        """Everything before the updates."""
        rows = [row for row in self.rows if not row.get("branch")]  # one per episode
        ids, rewards = [r["sample"] for r in rows], [r["reward"] for r in rows]
        self.call("actor", "log_probs")
        if "reference" in self.meshes:
            self.call("reference", "log_probs")
        if "critic" in self.meshes:
            self.call("critic", "values")
            self.exchange("values", "critic", "actor")
        metrics = self.call("actor", "advantages", ids, [r["group"] for r in rows], rewards, self.kl_coef)
        if "critic" in self.meshes:
            self.exchange("returns", "actor", "critic")
        return metrics

    def learn(self) -> dict[str, float]:
        """The whole step."""
        metrics = self.prepare()
        if "critic" in self.meshes:
            metrics |= self.call("critic", "update")
        return metrics | self.call("actor", "update", self.kl_coef)

    @property
    def kl_coef(self) -> float:
        return getattr(self.roles["actor"].config.algorithm, "kl_coef", 0.0)


def unused(data_source, solution_str, ground_truth, extra_info) -> float:
    raise NotImplementedError


def main(run: Callable[[Path, Path], None]) -> None:
    """Of a script that is called as SCRIPT FOLDER RANK DATA [...]: `run` gets FOLDER and DATA."""
    folder, rank, data = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    run(folder, data)
    dist.barrier()
    dist.destroy_process_group()


def run_on_ranks(script: Path, folder: Path, data: Path, *arguments: str) -> list[str]:
    """For tests: run the script as two processes. Returns what each wrote to stderr."""
    from tests.launch import run_ranks

    return run_ranks(WORLD_SIZE, lambda rank: ["-P", script, folder, rank, data, *arguments], timeout=200)

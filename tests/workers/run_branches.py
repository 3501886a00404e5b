"""Steps with episodes of one to four samples on two ranks. Started by test_branches.py.

    python tests/workers/run_branches.py FOLDER RANK DATA LAYOUT ...

FOLDER/report_<rank>.json: of each layout, way of packing, loss and aggregation the metrics of the step; of
each layout the mini-batch of every sample."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

if __name__ == "__main__":  # a test imports this file too, and must not find the folder triton_kernels/
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.invariants import check_plan, check_samples
from megarl.packing import branch_id
from tests.workers.role_steps import GROUP, NUM_PROMPTS, Step, build, main

LAYOUTS = {
    "dp2": "",
    "tp2": "--tensor-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
}
PACKINGS = 32, 500
"""Tokens of a micro-batch: one or two samples, and all that a rank has."""
AGGREGATIONS = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"
LOSSES = "ppo", "gspo", "gmpo"
RATE = "1e-12"  # an update does not change a weight by one bit, so every step begins with the same ones


def branching_rows(seed: int = 3) -> list[dict]:
    """Episodes whose samples have holes, and share their beginnings as the branches of a tree do."""
    rng, rows = random.Random(seed), []
    for episode in range(NUM_PROMPTS * GROUP):
        reward, num_branches = rng.uniform(-1, 1), rng.choice([1, 1, 2, 4])
        if episode == 5:
            reward = None
        whole = [rng.randrange(5, 200) for _ in range(rng.randint(2, 5))]
        for branch in range(num_branches):
            response, holes = [], []
            for turn in range(rng.randint(1, 2)):
                if turn:
                    holes.append((len(response), len(response) + 2))
                    response += [rng.randrange(5, 200) for _ in range(2)]
                response += [rng.randrange(5, 200) for _ in range(rng.randint(1, 4))]
            num_sampled = len(response) - 2 * len(holes)
            rows.append(
                {
                    "sample": branch_id(episode, branch),
                    "group": episode // GROUP,
                    "prompt": whole,
                    "response": response,
                    "holes": tuple(holes),
                    "rollout": [-5.0 - rng.random() for _ in range(num_sampled)],
                    "versions": [0] * num_sampled,
                    "reward": reward,
                    "branch": branch,
                    "num_branches": num_branches,
                }
            )
            if rng.random() < 0.5:
                whole = [*whole, *response[: rng.randint(1, len(response))]][:16]
    return rows


def run(folder: Path, data: Path) -> None:
    report: dict[str, dict] = {}
    rows = branching_rows()
    for layout in sys.argv[4:]:
        flags = f"--algorithm grpo --lr {RATE} --reward-max-failed-share 1 {LAYOUTS[layout]}"
        roles, meshes = build(flags, data, folder / layout)
        found = report[layout] = {}
        given = roles["actor"].config
        for max_tokens in PACKINGS:
            for loss in LOSSES if max_tokens == PACKINGS[0] else LOSSES[:1]:
                for aggregation in AGGREGATIONS:
                    algorithm = replace(
                        given.algorithm, policy_loss=loss, loss_aggregation=aggregation, **_CLIP[loss]
                    )
                    roles["actor"].config = replace(given, algorithm=algorithm)
                    roles["actor"]._is_token_level = False
                    step = Step(roles, meshes, rows, seed=1, max_tokens=max_tokens)
                    check_samples(step.samples, dict.fromkeys(range(NUM_PROMPTS), GROUP), 40)
                    check_plan(step.plan, step.samples, max_tokens)
                    found[f"{max_tokens} {loss} {aggregation}"] = step.learn()
        found["mini_batches"] = step.mini_batch_of
    (folder / f"report_{dist.get_rank()}.json").write_text(json.dumps(report))


_CLIP = {
    loss: {"clip_eps_low": low, "clip_eps_high": high}
    for loss, low, high in (("ppo", 0.2, 0.2), ("gspo", 3e-4, 4e-4), ("gmpo", 0.4, 0.4))
}

if __name__ == "__main__":
    main(run)

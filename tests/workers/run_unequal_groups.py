"""One GRPO step with groups of 1, 3 and 5 samples on two ranks. Started by test_unequal_groups.py.

    python tests/workers/run_unequal_groups.py FOLDER RANK DATA

Writes FOLDER/report_RANK.json: advantages by sample id, metrics, and what is said of wrong groups."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

if __name__ == "__main__":  # a test imports this file too, and must not find the folder triton_kernels/
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.trainer.rollout_batch import RolloutBatch
from megarl.invariants import InvariantError, check_plan, check_samples
from tests.workers.role_steps import MAX_TOKENS, Step, build, main, make_rows

GROUPS = {70_000_000_000: 1, 12: 3, 5: 5}
"""Group -> number of its samples. Neither ids nor groups follow from each other."""
VERSIONS = [[1], [2], [1, 2], [2], [0, 1, 2], [2], [0], [1, 1, 2], [2]]
"""Versions of the weights that sampled each response, in equal parts."""
REWARDS = [0.75, 0.0, 1.0, None, 2.0, 0.5, 0.5, -1.0, 0.25]


def unequal_rows() -> list[dict]:
    groups = [group for group, size in GROUPS.items() for _ in range(size)]
    ids = random.Random(0).sample(range(1000), len(groups))
    rows = make_rows(1)[: len(groups)]
    return [
        row
        | {"sample": sample, "group": group, "reward": reward}
        | {"versions": [of[i * len(of) // len(row["response"])] for i in range(len(row["response"]))]}
        for row, sample, group, reward, of in zip(rows, ids, groups, REWARDS, VERSIONS, strict=True)
    ]


def run(folder: Path, data: Path) -> None:
    flags = "--algorithm grpo --lr 1e-4 --kl-coef 0 --staleness 2 --tis-clip none"
    roles, meshes = build(flags, data, folder / "run")
    rows = unequal_rows()
    step = Step(roles, meshes, rows, seed=1)
    batch = RolloutBatch(1, {group: 0 for group in GROUPS}, samples=step.samples)
    batch.rewards = {row["sample"]: row["reward"] for row in rows}
    check_samples(batch.samples, GROUPS, max_length=32)
    check_plan(step.plan, batch.samples, max_tokens=MAX_TOKENS)
    actor, gaps = roles["actor"], {}
    for how in ("recompute", "keep", "wait"):
        streaming = replace(actor.config.streaming, weight_update=how)
        actor.config = replace(actor.config, streaming=streaming)
        gaps[how] = step.call("actor", "log_probs", 2), actor.worst_tokens(1)
    gaps["none is current"] = step.call("actor", "log_probs", 3), []
    gaps["all are current"] = step.call("actor", "log_probs"), actor.worst_tokens(1000)
    arguments = [batch.sample_ids, batch.group_ids, list(batch.rewards.values()), 0.0, batch.reward_digests]
    told = step.call("actor", "advantages", *arguments)
    shard = actor.shard.batch
    report = {
        "advantages": {
            int(sample): shard.advantages[start]
            for sample, start in zip(
                shard.sample_ids, shard.cu_seqlens[1:] - 1, strict=True
            )  # of the last token, which is of the response
        },
        "metrics": told | step.call("actor", "update", 0.0),
        "refused": [],
        "gaps": gaps,
    }
    report["advantages"] = {s: a.item() for s, a in report["advantages"].items()}
    by_division = [sample // 3 for sample in batch.sample_ids]
    of_another = [replace(s, group=12) for s in batch.samples]
    for wrong in (
        lambda: roles["actor"].advantages(arguments[0], by_division, *arguments[2:]),
        lambda: roles["data"].distribute("actor", of_another, step.plan),
    ):
        try:
            wrong()
        except InvariantError as error:
            report["refused"].append(str(error))
    (folder / f"report_{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(run)

"""Held-out accuracy: during training, and as the driver of `megarl eval`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.mesh import hosting_ranks, role_meshes
from megarl.config.schema import TrainConfig
from megarl.runtime.executor import Executor
from megarl.driver.preflight import Inputs, read_inputs
from megarl.driver.weights import sync_weights
from megarl.flow import Reward, Rollout

MODES = {"eval/accuracy": False, "eval/accuracy_greedy": True}
"""Metric -> whether it decodes greedily (else samples at --temperature)."""


def held_out_accuracy(
    rollout: Rollout, reward: Reward, rows: list[int]
) -> tuple[dict[str, float], dict[str, dict]]:
    """Mean reward of one response per row, sampled and greedy, and the first row's answer for each.

    A row draws the same noise at every evaluation, in a job and in `megarl eval`, so only
    the weights change the accuracies."""
    scores, answers = {}, {}
    for name, greedy in MODES.items():
        rollout.generate("eval", {row: row for row in rows}, greedy=greedy)
        records = [r for rank in reward.score("eval", num_logged=1).result() for r in rank]
        scores[name] = sum(r["reward"] or 0.0 for r in records) / len(records)
        answers[name] = next(r for r in records if r["sample_id"] == rows[0])
    return scores, answers


def evaluate_job(
    executor: Executor, config: TrainConfig, inputs: Mapping[str, Inputs], world_size: int
) -> None:
    """Load --model into the engines, answer --eval-data, write one JSON line to stdout. The job's other roles
    stay as they are."""
    meshes = role_meshes(config, world_size)
    for future in [executor.call(name, "setup") for name in ("actor", "rollout", "reward")]:
        future.result()
    rollout, reward = Rollout(executor, "rollout"), Reward(executor, "reward")
    sync_weights(executor, meshes, version=0).result()
    rows = list(range(len(inputs[""].evaluation)))[: config.run.eval_num_prompts]
    scores, _ = held_out_accuracy(rollout, reward, rows)
    sys.stdout.write(json.dumps({"model": config.model.model, "rows": len(rows), **scores}) + "\n")
    rollout.shut_down().result()
    reward.shut_down().result()


def main(argv: list[str]) -> int:
    from megarl.runtime.process import world_size_from_env
    from megarl.runtime.torchrun import run_driver

    config = load_config(argv, REGISTRY, "megarl eval")
    world_size = world_size_from_env()
    ranks = hosting_ranks(config, world_size)
    return run_driver(
        lambda executor: evaluate_job(
            executor, config, read_inputs(config, world_size, new_run=False), world_size
        ),
        ranks,
        config.placement.call_timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

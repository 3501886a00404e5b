"""Measure held-out accuracy during training and in the driver of `megarl eval`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.mesh import role_meshes
from megarl.config.reward_models import uses_rule_reward
from megarl.config.schema import TrainConfig
from megarl.runtime.executor import Executor
from megarl.trainer.launch import drive
from megarl.trainer.preflight import Inputs
from megarl.trainer.weights import sync_weights
from megarl.flow import Actor, Reward, Rollout
from megarl.flow.job_roles import Record
from megarl.role_names import with_suffix
from megarl.trainer.state import TrainState

MODES = {"eval/accuracy": False, "eval/accuracy_greedy": True}
"""Metric -> whether decoding is greedy (otherwise sampled at --temperature)."""


def held_out_accuracy(
    rollout: Rollout, reward: Reward, rows: list[int]
) -> tuple[dict[str, float], dict[str, Record]]:
    """Return the mean reward of one response per row, sampled and greedy, and the first row's answers.

    A row draws the same noise at every evaluation, in a job and in `megarl eval`. Only the weights change the
    accuracies."""
    scores: dict[str, float] = {}
    answers: dict[str, Record] = {}
    for name, greedy in MODES.items():
        rollout.generate("eval", {row: row for row in rows}, greedy=greedy)
        records = [r for rank in reward.score("eval", num_logged=1).result() for r in rank]
        scores[name] = sum(r["reward"] or 0.0 for r in records) / len(records)
        answers[name] = next(r for r in records if r["sample_id"] == rows[0])
    return scores, answers


def evaluate_actors(executor: Executor, state: TrainState) -> tuple[dict[str, float], dict[str, Record]]:
    """Evaluate every actor on --eval-data. Returns the scores and, for each score, the first row's answer.

    Raises: ValueError without --eval-data, or without a rule that scores."""
    scores: dict[str, float] = {}
    answers: dict[str, Record] = {}
    for suffix, actor in state.actors.items():
        if not actor.eval_rows:
            raise ValueError(
                "--eval-data: an evaluation needs held-out rows. Give one or more *.jsonl or *.parquet files."
            )
        if not uses_rule_reward(actor.config):
            raise ValueError(
                "--reward-model: held-out answers are scored by a rule, and with it there is "
                "none. Add --reward auto."
            )
        rollout, reward = Rollout(executor, f"rollout{suffix}"), Reward(executor, f"reward{suffix}")
        own_scores, own_answers = held_out_accuracy(rollout, reward, actor.eval_rows)
        scores |= {with_suffix(name, suffix): score for name, score in own_scores.items()}
        answers |= {with_suffix(name, suffix): answer for name, answer in own_answers.items()}
    return scores, answers


def evaluate_job(
    executor: Executor, config: TrainConfig, inputs: Mapping[str, Inputs], world_size: int
) -> None:
    """Load --model into the engines, answer --eval-data, and write one JSON line to stdout.

    The job's other roles are not set up."""
    actor, rollout, reward = (
        Actor(executor, "actor"),
        Rollout(executor, "rollout"),
        Reward(executor, "reward"),
    )
    for future in (actor.setup(), rollout.setup(), reward.setup()):
        future.result()
    sync_weights(executor, role_meshes(config, world_size), version=0).result()
    rows = list(range(len(inputs[""].evaluation or ())))[: config.run.eval_num_prompts]
    scores, _ = held_out_accuracy(rollout, reward, rows)
    sys.stdout.write(json.dumps({"model": config.model.model, "rows": len(rows), **scores}) + "\n")
    rollout.shut_down().result()
    reward.shut_down().result()


def main(argv: list[str]) -> int:
    return drive(load_config(argv, REGISTRY, "megarl eval"), evaluate_job, new_run=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

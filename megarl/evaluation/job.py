"""Run an evaluation on the ranks: load the model, answer the held-out rows, print the scores."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megarl.config.mesh import role_meshes
from megarl.config.schema import TrainConfig
from megarl.evaluation.arguments import Options
from megarl.evaluation.report import as_json, sample_lines, table
from megarl.flow import Actor, Reward, Rollout
from megarl.trainer.announce import Say, line_on, reminding, wait_for_setups
from megarl.trainer.evaluation import Answering, HeldOut, answer_rows, run
from megarl.trainer.weights import sync_weights

if TYPE_CHECKING:
    from megarl.runtime.executor import Executor
    from megarl.trainer.preflight import Inputs


def evaluate_job(
    executor: Executor,
    config: TrainConfig,
    inputs: Mapping[str, Inputs],
    world_size: int,
    *,
    options: Options,
    model: str,
) -> None:
    """Load --model into the engines, answer --eval-data, and print the scores. The job's other roles are not
    set up.

    Args:
        options: whether the result is a table or JSON, and the file for the samples.
        model: --model as the user gave it."""
    actor, rollout, reward = (
        Actor(executor, "actor"),
        Rollout(executor, "rollout"),
        Reward(executor, "reward"),
    )
    say = progress_of(options)
    # an evaluation computes no gradients: no optimizer is built
    setups = {
        "actor": actor.setup(is_trained=False),
        "rollout": rollout.setup(),
        "reward": reward.setup(),
    }
    wait_for_setups(setups, say)
    sync_weights(executor, role_meshes(config, world_size), version=0).result()
    rows = inputs[""].eval_rows(config.run.eval_num_prompts)
    num_logged = -1 if options.out is not None else 0
    modes = [True] if config.sampling.temperature == 0 else [False, True]
    results: dict[bool, HeldOut] = {}
    for greedy in modes:
        with reminding(say, _evaluating(config, len(rows), greedy)):
            by = Answering.by_all(rollout, reward)
            results[greedy] = run(answer_rows(by, rows, config, greedy, num_logged))
    sampled, greedy = results.get(False), results[True]
    if options.out is not None:
        with open(options.out, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in sample_lines(sampled, greedy))
    result = as_json(config, model, sampled, greedy)
    if options.as_json:
        sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
    else:
        sys.stdout.write(table(result, options.out))
    sys.stdout.flush()
    rollout.shut_down().result()
    reward.shut_down().result()


def progress_of(options: Options) -> Say:
    """Return the function that shows progress: on stdout above the table, or on stderr beside --json."""
    return line_on(sys.stderr if options.as_json else None)


def _evaluating(config: TrainConfig, num_prompts: int, greedy: bool) -> str:
    prompts = f"evaluating {num_prompts} prompt{'s' if num_prompts > 1 else ''}"
    if greedy:
        return f"{prompts}, greedy"
    count = config.run.eval_num_samples
    samples = f"{count} sample{'s' if count > 1 else ''}"
    return f"{prompts} x {samples} at temperature {config.sampling.temperature:g}"

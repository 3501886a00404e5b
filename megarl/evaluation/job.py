"""Run an evaluation on the ranks: load the model, answer the held-out rows, print the scores."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.mesh import role_meshes
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.evaluation.arguments import Options
from megarl.evaluation.report import as_json, sample_lines, table
from megarl.files.writing import writing
from megarl.flow import Actor, Reward, Rollout
from megarl.futures import Future
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
    models: Mapping[str, str],
) -> None:
    """Load the model of each actor into its engines, answer --eval-data, and print the scores. The job's other
    roles are not set up.

    Args:
        options: whether the result is a table or JSON, and the file for the samples.
        models: suffix of an actor -> --model as the user gave it."""
    say, meshes, configs = progress_of(options), role_meshes(config, world_size), configs_of_actors(config)
    setups: dict[str, Future[Any]] = {}
    for suffix in configs:
        # an evaluation computes no gradients: no optimizer is built
        setups[f"actor{suffix}"] = Actor(executor, f"actor{suffix}").setup(is_trained=False)
        setups[f"rollout{suffix}"] = Rollout(executor, f"rollout{suffix}").setup()
        setups[f"reward{suffix}"] = Reward(executor, f"reward{suffix}").setup()
    wait_for_setups(setups, say)
    for synced in [sync_weights(executor, meshes, version=0, suffix=suffix) for suffix in configs]:
        synced.result()
    held_out = _answers(executor, configs, inputs, -1 if options.out is not None else 0, say)
    _report(config, models, held_out, options)
    for suffix in configs:
        Rollout(executor, f"rollout{suffix}").shut_down().result()
        Reward(executor, f"reward{suffix}").shut_down().result()


def _answers(
    executor: Executor,
    configs: Mapping[str, TrainConfig],
    inputs: Mapping[str, Inputs],
    num_logged: int,
    say: Say,
) -> dict[str, dict[bool, HeldOut]]:
    """Return suffix of each actor -> whether greedy -> its answers. There are greedy ones only if every
    temperature is 0."""
    found: dict[str, dict[bool, HeldOut]] = {suffix: {} for suffix in configs}
    only_greedy = all(one.sampling.of("eval").temperature == 0 for one in configs.values())
    for greedy in [True] if only_greedy else [False, True]:  # actors may play in the same episodes: in turns
        for suffix, config in configs.items():
            rows = inputs[suffix].eval_rows(config.run.eval_num_prompts)
            by = Answering.by_all(Rollout(executor, f"rollout{suffix}"), Reward(executor, f"reward{suffix}"))
            who = f"actor{suffix}: " if len(configs) > 1 else ""
            with reminding(say, who + _evaluating(config, len(rows), greedy)):
                found[suffix][greedy] = run(answer_rows(by, rows, config, greedy, num_logged))
    return found


def _report(
    config: TrainConfig,
    models: Mapping[str, str],
    held_out: Mapping[str, Mapping[bool, HeldOut]],
    options: Options,
) -> None:
    """Write the scores of each actor to stdout, and then the samples into --out.

    The scores come first, so that a full disk does not take them too.

    Raises: WriteError."""
    results = {
        f"actor{suffix}": as_json(
            of_actor, models[suffix], held_out[suffix].get(False), held_out[suffix][True]
        )
        for suffix, of_actor in configs_of_actors(config).items()
    }
    if options.as_json:
        result = results if len(results) > 1 else results["actor"]
        sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
    else:
        tables = [
            (f"{actor}\n" if len(results) > 1 else "") + table(result) for actor, result in results.items()
        ]
        sys.stdout.write("\n".join(tables))
    sys.stdout.flush()
    if options.out is not None:
        _write_samples(options.out, held_out)
        if not options.as_json:
            sys.stdout.write(f"samples: {options.out}; look at them with `megarl show {options.out}`\n")
            sys.stdout.flush()


def _write_samples(path: Path, held_out: Mapping[str, Mapping[bool, HeldOut]]) -> None:
    """Write every sample of every actor into a file, one JSON object a line. Raises: WriteError."""
    with writing(path), open(path, "w", encoding="utf-8") as file:
        for suffix, of_actor in held_out.items():
            lines = sample_lines(of_actor.get(False), of_actor[True], suffix)
            file.writelines(f"{line}\n" for line in lines)


def progress_of(options: Options) -> Say:
    """Return the function that shows progress: on stdout above the table, or on stderr beside --json."""
    return line_on(sys.stderr if options.as_json else None)


def _evaluating(config: TrainConfig, num_prompts: int, greedy: bool) -> str:
    prompts = f"evaluating {num_prompts} prompt{'s' if num_prompts > 1 else ''}"
    if greedy:
        return f"{prompts}, greedy"
    count = config.run.eval_num_samples
    samples = f"{count} sample{'s' if count > 1 else ''}"
    return f"{prompts} x {samples} at temperature {config.sampling.of('eval').temperature:g}"

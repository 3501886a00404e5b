"""Make the configuration of an evaluation from the command line of `megarl eval`.

It is the configuration of a training job in which everything that an evaluation does not need has a default.
So a job's own args file works: its flags of training have no effect."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.algorithms import GRPO, REGISTRY, samples
from megarl.config.args_file import COMMAND_LINE, Occurrence, Reader, numbered
from megarl.config.errors import ConfigError, raise_errors
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.config.render import help_of
from megarl.config.reward_models import uses_rule_reward
from megarl.config.roles import configs_of_actors, with_each_actor
from megarl.config.rules_training import NO_EVAL_DATA
from megarl.config.schema import (
    CheckpointConfig,
    LoRAConfig,
    MoEConfig,
    ProfileConfig,
    RewardModelConfig,
    SftConfig,
    StreamingConfig,
    TrainConfig,
)
from megarl.files.checkpoints import run_of_model
from megarl.files.writing import obstacle
from megarl.inspect.models import (
    ambiguous_model,
    model_errors,
    model_folder,
    models_of_others,
    num_actors_of_run,
    shares_episodes,
)
from megarl.loggers.base import flags_of
from megarl.role_names import number_of

DEFAULTS = ["--algorithm", "grpo", "--train-iters", "1", "--train-data", "--save", "unused"]
"""Flags that the configuration of every job needs, and an evaluation has no use for."""
MAX_PROMPT_LENGTH = MAX_RESPONSE_LENGTH = 1024
SUFFIX, ARGUMENTS = ".jsonl", "resolved.args"
_HELP = """\
usage: megarl eval --model RUN [--eval-num-samples N] [--out FILE] [--json] ...
       megarl eval --model M --eval-data D ...
       megarl eval --model M --actor-2-model M2 --num-actors 2 --share-episodes --env E --eval-data D ...

Sample answers to held-out rows, score them by a rule, and print the scores with confidence intervals. The
first form repeats the last evaluation of a run: data, reward, lengths, temperature and ranks are the run's
(RUN/resolved.args), and flags that you add override them. RUN may also be its hf/ or one of its checkpoints.
The second form is for any other model or data. M is a Hugging Face folder, a run, or a checkpoint of a run,
and everything that you do not give has a default of its own. @file.args of a job gives the evaluation the
job's settings; its flags of training have no effect.

The third form lets two policies play in the same episodes, each when the environment names it. Of a run with
several actors, --model RUN is enough: each plays with its own weights. A flag without a number, such as
--temperature, is every actor's, and --actor-2-temperature is the second one's.

  --out FILE.jsonl
        Write every sample into this file, which `megarl show FILE` reads.
  --json
        Print one JSON object instead of the table.

"""
_SHOWN = {
    "model": ("model", "tokenizer_model", "chat_template_args", "bf16"),
    "data": (
        "eval_data",
        "prompt_key",
        "reward",
        "reward_function",
        "reward_num_workers",
        "reward_timeout_s",
        "reward_max_failed_share",
    ),
    "episodes": (
        "env",
        "env_timeout_s",
        "env_episodes_per_process",
        "env_python",
        "agent_command",
        "agent_timeout_s",
        "agent_num_processes",
        "env_verifiers",
        "env_verifiers_client",
        "env_verifiers_config",
        "max_branches",
        "share_episodes",
        "tool_call_parser",
        "reasoning_parser",
    ),
    "run": ("eval_num_samples", "eval_num_prompts"),
    "sampling": (
        "temperature",
        "top_p",
        "top_k",
        "max_prompt_length",
        "max_response_length",
        "eval_temperature",
        "eval_top_p",
        "eval_max_response_length",
        "max_turns",
        "max_context_length",
        "stop",
        "stop_token_ids",
    ),
    "batch": ("seed",),
    "placement": ("nproc_per_node", "nnodes", "num_actors", "executor", "ray_address"),
    "rollout": ("tensor_parallel_size", "dtype", "gpu_memory_utilization", "max_num_seqs"),
}
"""Section -> fields whose flags `megarl eval --help` shows."""
_TEXTS = {
    "eval-data": "Files with the rows to answer: *.jsonl or *.parquet in verl's columns. Default: those of "
    "the run in --model.",
    "model": "A Hugging Face folder, a run (its hf/, else its newest checkpoint), or a checkpoint. Required.",
    "bf16": "Weights and activations in bfloat16. Default: fp32.",
    "reward-max-failed-share": "Share of the rewards that may fail; a larger one ends the evaluation. "
    "Responses without a reward count in no number. Default: 0.1.",
    "eval-num-samples": "Responses sampled per row, besides the greedy one. With several there are pass@k "
    "and majority votes. Default: 1.",
    "temperature": "Sampling temperature; 0 gives the greedy answers alone. Default: 1.0.",
    "top-p": "Nucleus sampling. Default: 1.0.",
    "top-k": "Top-k sampling; 0 is off. Default: 0.",
    "max-prompt-length": "Tokens of a prompt; a longer one is an error. Default: 1024, or half of what the "
    "model can read if that is less.",
    "max-response-length": "Tokens of a response; a longer one is cut there. Default: 1024, or what the "
    "prompts leave of what the model can read if that is less.",
    "num-actors": "Policies that are evaluated. Each has a model of its own: --actor-2-model M. Default: 1, or "
    "those of the run in --model.",
    "share-episodes": "All policies play in the same episodes of --env, each when the environment names it. "
    "Default: as in the run in --model, else off.",
    "nproc-per-node": "Ranks on this machine. They share the rows.",
}
"""Flag -> its text in `megarl eval --help`, where it differs from that of a training job."""


@dataclass(frozen=True, slots=True)
class Options:
    """Where and in which form the result of an evaluation is written.

    Args:
        out: file for the samples; None: no file.
        as_json: print a JSON object instead of a table."""

    out: Path | None = None
    as_json: bool = False


def split_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the options and the remaining arguments, which are the configuration's. Raises: ConfigError for
    a file that cannot be written, and for --json with a value."""
    parser = argparse.ArgumentParser("megarl eval", allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--out", nargs="?", const="")
    parser.add_argument("--json", action="store_true")
    try:
        found, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError:  # --out takes any value, and other flags are the configuration's
        value = next(word for word in argv if word.startswith("--json=")).partition("=")[2]
        raise ConfigError([f"--json ({value}): takes no value. Write --json, or leave it out."]) from None
    if found.out is None:
        return Options(None, found.json), rest
    path = Path(found.out)
    if path.suffix != SUFFIX:
        better = path.with_suffix(SUFFIX) if path.name else f"samples{SUFFIX}"
        raise ConfigError([f"--out ({found.out}): must name a file that ends in {SUFFIX}. Try {better}."])
    if (why := _unwritable(path)) is not None:
        advice = f"Try --out {path.stem}-samples{SUFFIX}."
        if obstacle(Path()) is not None:
            advice = "Name a file in a folder in which this user may write."
        raise ConfigError([f"--out ({path}): {why}. {advice}"])
    return Options(path, found.json), rest


def _unwritable(path: Path) -> str | None:
    """Return why a file cannot be written, or None."""
    if os.path.isdir(path):
        return "is a folder"
    if os.path.exists(path):
        return None if os.access(path, os.W_OK) else "this user may not write to it"
    return obstacle(path.parent) if os.path.isdir(path.parent) else f"there is no folder {path.parent}"


def check_out(options: Options, config: TrainConfig) -> None:
    """Raise ConfigError if --out would overwrite the data of the evaluation or of its run."""
    if options.out is None or not options.out.exists():
        return
    for one in configs_of_actors(config).values():
        for flag, files in (("eval-data", one.data.eval_data), ("train-data", one.data.train_data)):
            if any(os.path.exists(file) and options.out.samefile(file) for file in files):
                better = options.out.with_stem(f"{options.out.stem}-samples")
                raise ConfigError([f"--out ({options.out}): is a file of --{flag}. Try --out {better}."])


def with_settings_of_run(argv: Sequence[str]) -> list[str]:
    """Return the command line with the run's resolved.args in front, if --model is of a run and the command
    line has neither --eval-data nor an args file.

    A run without --eval-data, and one of supervised fine-tuning, have no settings of an evaluation."""
    given = Reader()
    given.read(argv)
    words = [one.words for one in given.occurrences if one.base == "model" and one.number == 1]
    has_data = any(one.base == "eval-data" or one.place != COMMAND_LINE for one in given.occurrences)
    if has_data or given.misses_flags or given.errors or not words or len(words[-1]) != 1:
        return list(argv)
    name = words[-1][0].text
    run = run_of_model(Path(name))
    if run is None:
        return list(argv)
    try:
        settings = flags_of((run / ARGUMENTS).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return list(argv)
    if settings.get("eval-data") in (None, "true") or not samples(settings.get("algorithm")):
        return list(argv)
    if (count := num_actors_of_run(run)) > 1 and not models_of_others(name):
        raise ConfigError(
            [
                f"--model ({name}): is the model of one actor of a run with {count}. Give the run, --model {run}, or "
                "evaluate this one alone, on --eval-data."
            ]
        )
    return [f"@{run / ARGUMENTS}", *argv]


def with_models_of_run(argv: Sequence[str]) -> list[str]:
    """Return the command line with an --actor-N-model for each actor that has none, if --model is of a run with
    several actors.

    With --env, the policies of a run that has trained them in the same episodes play together, also without
    --num-actors.

    Raises: ConfigError if the run has fewer actors than --num-actors."""
    given = Reader()
    given.read(argv)
    typed = [one for one in given.occurrences if one.place == COMMAND_LINE and len(one.words) == 1]
    models = [one for one in typed if one.base == "model" and one.number == 1]
    if given.misses_flags or given.errors or not models:
        return list(argv)
    own = {
        one.number: one.words[0].text
        for one in typed
        if one.base in ("model", "actor-model") and one.number > 1
    }
    raise_errors([error for number, named in own.items() for error in ambiguous_model(number, named)])
    name = models[-1].words[0].text
    others, count = models_of_others(name), _num_actors(given.occurrences)
    if not others:
        return list(argv)
    extra: list[str] = []
    if count is None:
        if not shares_episodes(run_of_model(Path(name))) or all(
            one.base != "env" for one in given.occurrences
        ):
            return list(argv)
        count = len(others) + 1
        extra = ["--num-actors", str(count), "--share-episodes"]
    missing = [number for number in range(2, count + 1) if number not in own]
    if unknown := [number for number in missing if number not in others]:
        raise ConfigError(
            [
                f"--num-actors ({count}): --model ({name}) is of a run with {len(others) + 1} actors. Try "
                f"{len(others) + 1}, or name a model of the others: --{numbered('model', unknown[0])} M."
            ]
        )
    words = [word for number in missing for word in (f"--{numbered('model', number)}", others[number])]
    return [*argv, *extra, *words]


def _num_actors(given: Sequence[Occurrence]) -> int | None:
    """Return the value of --num-actors; None if it is not given, or is no number."""
    found = [one for one in given if one.base == "num-actors" and len(one.words) == 1]
    text = max(found, key=lambda one: one.level).words[0].text if found else ""
    return int(text) if text.isdecimal() else None


def load_evaluation(argv: Sequence[str]) -> TrainConfig:
    """Return the configuration of an evaluation with --model as it is given. Raises: ConfigError with all
    errors; SystemExit(0) after --help."""
    if not {"--help", "-h"}.isdisjoint(argv):
        sys.stdout.write(_HELP + help_of(_SHOWN, _TEXTS))
        raise SystemExit(0)
    given = Reader()
    given.read(argv)
    try:
        config = load_config(argv, REGISTRY, "megarl eval", DEFAULTS)
    except ConfigError as error:
        has_data = given.misses_flags or any(one.base == "eval-data" for one in given.occurrences)
        errors = [*error.errors, *([] if has_data else [NO_EVAL_DATA])]
        raise ConfigError(errors, is_complete=False) from None
    typed = {one.base for one in given.occurrences if one.place == COMMAND_LINE}
    load, errors = config.checkpoint.load, []
    if "load" in typed:
        errors.append(f"--load ({load}): an evaluation takes it as --model. Try --model {load}.")
    if "random-init" in typed:
        errors.append("--random-init: an evaluation is of the weights in --model. Leave it out.")
    if "profile" in typed and config.profile.profile is not None:
        errors.append(f"--profile ({config.profile.profile}): profiles steps of training. Leave it out.")
    raise_errors(errors)
    return with_each_actor(config, lambda of_actor, _: _without_training(of_actor))


def _without_training(config: TrainConfig) -> TrainConfig:
    """Return the configuration of one actor without what only training uses: critic, reference, reward
    models, profile and so on.

    Their models and files may be gone, and their layouts need not fit the actor's model."""
    config = replace(
        config,
        model=replace(config.model, random_init=False),
        lora=LoRAConfig(),  # exports and checkpoints are evaluated with their adapters merged
        experts=MoEConfig(),
        data=replace(config.data, train_data=()),
        sft=SftConfig(),
        run=replace(config.run, eval_interval=0, log_with=()),
        streaming=StreamingConfig(),
        checkpoint=CheckpointConfig(),
        profile=ProfileConfig(),
    )
    algorithm, batch = config.algorithm, config.batch
    if not algorithm.needs_rollout or not uses_rule_reward(config):
        return config  # the rule `evaluation_alone` refuses it
    group_size = batch.num_samples_per_prompt + algorithm.greedy_samples  # the engines are sized by it
    return replace(
        config,
        algorithm=GRPO(),  # it needs no role but the actor and its engines
        model=replace(config.model, critic_model=None, reference_model=None, reference_update_interval=None),
        batch=replace(batch, num_samples_per_prompt=group_size),
        critic=None,
        critic_optimizer=None,
        critic_lora=None,
        reference=None,
        reward=None,
        reward_models=RewardModelConfig(),
        placement=replace(
            config.placement, critic_ranks=None, reference_ranks=None, reward_ranks=(), offload_ahead_bytes=0
        ),
    )


def load_evaluation_on_rank(argv: Sequence[str]) -> TrainConfig:
    """Return the configuration of an evaluation that the caller's torchrun has started.

    Raises: ConfigError also for a checkpoint without export, which one process would have to export first."""
    options, argv = split_options(argv)
    argv = with_models_of_run(with_settings_of_run(argv))
    config = load_evaluation(argv)
    check_out(options, config)
    folders = {name: model_folder(name) for name in names_of_models(config).values()}
    raise_errors(
        [
            f"--{numbered('model', number_of(suffix))} ({name}): is a checkpoint, which `megarl eval` exports first "
            "and torchrun's ranks do not. Export it: megarl convert --model M --load CHECKPOINT --save OUT, and give "
            "OUT."
            for suffix, name in names_of_models(config).items()
            if folders[name] is None
        ]
    )
    return with_models(config, {name: folder for name, folder in folders.items() if folder is not None}, argv)


def names_of_models(config: TrainConfig) -> dict[str, str]:
    """Return suffix -> --model of each actor."""
    return {suffix: one.model.model for suffix, one in configs_of_actors(config).items()}


def with_models(config: TrainConfig, folders: Mapping[str, Path], argv: Sequence[str]) -> TrainConfig:
    """Return the configuration with the Hugging Face folders of the actors' models, and with the default lengths
    for these models where `argv` gives none.

    Args:
        folders: --model of an actor -> its folder."""
    given = Reader()
    given.read(argv)

    def change(of_actor: TrainConfig, suffix: str) -> TrainConfig:
        number, folder = number_of(suffix), folders[of_actor.model.model]
        names = {one.base.removeprefix("actor-") for one in given.occurrences if one.number in (1, number)}
        return _with_model(of_actor, folder, names)

    return with_each_actor(config, change)


def _with_model(config: TrainConfig, folder: Path, names: set[str]) -> TrainConfig:
    """Return the configuration of one actor with its model's folder and default lengths.

    Args:
        names: flags that are given."""
    config = replace(config, model=replace(config.model, model=str(folder)))
    limit = ModelShape.load(str(folder)).max_position_embeddings
    prompt, response = config.sampling.max_prompt_length, config.sampling.max_response_length
    if "max-prompt-length" not in names:
        longest = limit - response if "max-response-length" in names else limit // 2
        prompt = max(1, min(MAX_PROMPT_LENGTH, longest))
    if "max-response-length" not in names:
        response = max(1, min(MAX_RESPONSE_LENGTH, limit - prompt))
    sampling = replace(config.sampling, max_prompt_length=prompt, max_response_length=response)
    return replace(config, sampling=sampling)


def check_models(config: TrainConfig) -> None:
    """Raise ConfigError if a --model is no model, together with all other errors that do not depend on it."""
    from megarl.config.check import job_errors

    flags: dict[str, str] = {}  # by model: actors with the same one have one error
    for suffix, name in names_of_models(config).items():
        flags.setdefault(name, numbered("model", number_of(suffix)))
    if errors := [error for name, flag in flags.items() for error in model_errors(name, flag)]:
        others = job_errors(config, config.placement.world_size, new_run=False)
        raise_errors([*errors, *(error for error in others if not _is_of_model(error))])


def _is_of_model(error: str) -> bool:
    """Return whether an error is about an actor's --model."""
    return re.match(r"(actor_\d+: )?--(actor-\d+-)?model ", error) is not None

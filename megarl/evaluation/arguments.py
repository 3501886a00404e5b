"""Make the configuration of an evaluation from the command line of `megarl eval`.

It is the configuration of a training job in which everything that an evaluation does not need has a default.
So a job's own args file works: its flags of training have no effect."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.algorithms import REGISTRY, samples
from megarl.config.args_file import COMMAND_LINE, Reader
from megarl.config.errors import ConfigError, raise_errors
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.config.render import help_of
from megarl.config.rules_training import NO_EVAL_DATA
from megarl.config.schema import CheckpointConfig, LoRAConfig, StreamingConfig, TrainConfig
from megarl.files.checkpoints import run_of_model
from megarl.inspect.models import model_folder
from megarl.loggers.base import flags_of

DEFAULTS = ["--algorithm", "grpo", "--train-iters", "1", "--train-data", "--save", "unused"]
"""Flags that the configuration of every job needs, and an evaluation has no use for."""
MAX_PROMPT_LENGTH = MAX_RESPONSE_LENGTH = 1024
SUFFIX, ARGUMENTS = ".jsonl", "resolved.args"
_HELP = """\
usage: megarl eval --model RUN [--eval-num-samples N] [--out FILE] [--json] ...
       megarl eval --model M --eval-data D ...

Sample answers to held-out rows, score them by a rule, and print the scores with confidence intervals. The
first form repeats the last evaluation of a run: data, reward, lengths, temperature and ranks are the run's
(RUN/resolved.args), and flags that you add override them. RUN may also be its hf/ or one of its checkpoints.
The second form is for any other model or data. M is a Hugging Face folder, a run, or a checkpoint of a run,
and everything that you do not give has a default of its own. @file.args of a job gives the evaluation the
job's settings; its flags of training have no effect.

  --out FILE.jsonl
        Write every sample into this file, which `megarl show FILE` reads.
  --json
        Print one JSON object instead of the table.

"""
_SHOWN = {
    "model": ("model", "tokenizer_model", "bf16"),
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
        "max_turns",
        "max_context_length",
        "stop",
        "stop_token_ids",
    ),
    "batch": ("seed",),
    "placement": ("nproc_per_node", "nnodes", "executor", "ray_address"),
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
    a file that cannot be written."""
    parser = argparse.ArgumentParser("megarl eval", allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--out", nargs="?", const="")
    parser.add_argument("--json", action="store_true")
    found, rest = parser.parse_known_args(list(argv))
    if found.out is None:
        return Options(None, found.json), rest
    path = Path(found.out)
    if path.suffix != SUFFIX:
        better = path.with_suffix(SUFFIX) if path.name else f"samples{SUFFIX}"
        raise ConfigError([f"--out ({found.out}): must name a file that ends in {SUFFIX}. Try {better}."])
    if not path.parent.is_dir() or path.is_dir():
        why = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError([f"--out ({path}): {why}. Try --out {path.stem}-samples{SUFFIX}."])
    return Options(path, found.json), rest


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
    run = run_of_model(Path(words[-1][0].text))
    if run is None:
        return list(argv)
    try:
        settings = flags_of((run / ARGUMENTS).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return list(argv)
    if settings.get("eval-data") in (None, "true") or not samples(settings.get("algorithm")):
        return list(argv)
    return [f"@{run / ARGUMENTS}", *argv]


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
    raise_errors(errors)
    return replace(
        config,
        model=replace(config.model, random_init=False),
        lora=LoRAConfig(),  # exports and checkpoints are evaluated with their adapters merged
        data=replace(config.data, train_data=()),
        run=replace(config.run, eval_interval=0, log_with=()),
        streaming=StreamingConfig(),
        checkpoint=CheckpointConfig(),
    )


def load_evaluation_on_rank(argv: Sequence[str]) -> TrainConfig:
    """Return the configuration of an evaluation that the caller's torchrun has started.

    Raises: ConfigError also for a checkpoint without export, which one process would have to export first."""
    _, argv = split_options(argv)
    argv = with_settings_of_run(argv)
    config = load_evaluation(argv)
    folder = model_folder(config.model.model)
    if folder is None:
        name = config.model.model
        raise ConfigError(
            [
                f"--model ({name}): is a checkpoint, which `megarl eval` exports first and torchrun's ranks "
                "do not. Export it: megarl convert --model M --load CHECKPOINT --save OUT, and give OUT."
            ]
        )
    return with_model(config, folder, argv)


def with_model(config: TrainConfig, folder: Path, argv: Sequence[str]) -> TrainConfig:
    """Return the configuration with the model's Hugging Face folder, and with the default lengths for this
    model where `argv` gives none."""
    config = replace(config, model=replace(config.model, model=str(folder)))
    given = Reader()
    given.read(argv)
    names = {one.base for one in given.occurrences}
    limit = ModelShape.load(str(folder)).max_position_embeddings
    prompt, response = config.sampling.max_prompt_length, config.sampling.max_response_length
    if "max-prompt-length" not in names:
        longest = limit - response if "max-response-length" in names else limit // 2
        prompt = max(1, min(MAX_PROMPT_LENGTH, longest))
    if "max-response-length" not in names:
        response = max(1, min(MAX_RESPONSE_LENGTH, limit - prompt))
    sampling = replace(config.sampling, max_prompt_length=prompt, max_response_length=response)
    return replace(config, sampling=sampling)


def model_errors(name: str) -> list[str]:
    """Return the error of a --model that is no model, run or checkpoint; [] if it is one."""
    try:
        model_folder(name)
    except ConfigError as error:
        return list(error.errors)
    return []


def check_model(config: TrainConfig) -> None:
    """Raise ConfigError if --model is no model, together with all other errors that do not depend on it."""
    from megarl.config.check import job_errors

    if errors := model_errors(config.model.model):
        others = job_errors(config, config.placement.world_size, new_run=False)
        raise_errors([*errors, *(error for error in others if not error.startswith("--model "))])

"""Parse the command line of `megarl data`, and take what it leaves out from the args file of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from typing import TYPE_CHECKING

from megarl.config.errors import ConfigError, raise_errors
from megarl.config.hub import local_path
from megarl.config.role_sections import SamplingConfig
from megarl.inspect.arguments import Parser, whole

if TYPE_CHECKING:
    from megarl.config.schema import TrainConfig
    from megarl.data.prompts import Needs
    from megarl.data.rendering import Turns

_LENGTHS = SamplingConfig()
_LENGTH_NAMES = frozenset({"max_prompt_length", "max_response_length"})
_REQUIRED = [
    "--algorithm",
    "grpo",
    "--train-iters",
    "1",
    "--train-data",
    "--save",
    "unused",
    "--model",
    "unused",
]
"""Flags that every job needs. The args file of a job may leave them out here."""
_NO_MODEL = (
    "--model: is required for its tokenizer. Give a Hugging Face folder, a run, or @file.args of a job that "
    "has the flag."
)
_NO_FILE = "FILE: is required. Name one or more *.jsonl or *.parquet files, or @file.args of a job with --train-data."


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """The data files to show, and how a job would read them.

    Args:
        needs: the part that every row of the job must have besides the prompt; None: no other part.
        turns: the answers that the job trains on.
        default_lengths: names of the two lengths that neither the command line nor a job's args file gives.
        rows: number of rows to show from the first on, if `row` is None.
        row: the rows to show.
        out: file to write the rows into that a job can use."""

    files: Sequence[str] = ()
    model: str | None = None
    tokenizer_model: str | None = None
    prompt_key: str = "prompt"
    max_prompt_length: int = _LENGTHS.max_prompt_length
    max_response_length: int = _LENGTHS.max_response_length
    default_lengths: frozenset[str] = _LENGTH_NAMES
    needs: Needs = None
    turns: Turns = "last"
    chat_template_args: Mapping[str, object] = field(default_factory=dict)
    rows: int = 3
    row: Sequence[int] | None = None
    out: str | None = None


def parse(argv: Sequence[str], description: str) -> DataArguments:
    """Return the arguments. Flags and files of the command line override those of @file.args.

    Raises: ConfigError; SystemExit(0) after --help."""
    jobs = [word for word in argv if word.startswith("@")]
    words = [word for word in argv if not word.startswith("@")]
    typed = {name: value for name, value in vars(_parser(description).parse(words)).items() if value != []}
    given = {name: value for name, value in typed.items() if value is not None}
    of_job = _of_job(jobs) if jobs else DataArguments()
    arguments = replace(of_job, **given, default_lengths=of_job.default_lengths - given.keys())
    errors = [] if arguments.files else [_NO_FILE]
    if arguments.model is None and arguments.tokenizer_model is None:
        errors.append(_NO_MODEL)
    raise_errors(errors)
    return arguments


def _parser(description: str) -> Parser:
    """Return the parser of the command line. A flag that is not given is None."""
    default = DataArguments()
    prompt, response = default.max_prompt_length, default.max_response_length
    parser = Parser("data", description)
    parser.add_argument(
        "files",
        type=local_path,
        metavar="FILE",
        nargs="*",
        help="*.jsonl or *.parquet; or @file.args of a job, for its files, tokenizer and lengths",
    )
    parser.add_argument("--model", type=local_path, help="a Hugging Face folder or a run, for its tokenizer")
    parser.add_argument("--tokenizer-model", type=local_path, help="the tokenizer, if it is not in --model")
    parser.add_argument(
        "--chat-template-args", type=json.loads, help="what the chat template reads besides, as JSON"
    )
    parser.add_argument("--prompt-key", help="column of the prompt; default: prompt")
    parser.add_argument("--max-prompt-length", type=whole(1, prompt), help=f"tokens; default: {prompt}")
    parser.add_argument("--max-response-length", type=whole(1, response), help=f"tokens; default: {response}")
    parser.add_argument("--rows", type=whole(0, 3), help=f"show the first so many; default: {default.rows}")
    parser.add_argument("--row", type=whole(0, 0), nargs="+", help="show these rows, counted from 0")
    parser.add_argument(
        "--out", help="write the rows that training takes into this *.jsonl, and name the others"
    )
    return parser


def _of_job(jobs: Sequence[str]) -> DataArguments:
    """Return the arguments that @file.args of a job give. A job with several actors gives those of the first.

    Raises: ConfigError with all errors of the files."""
    from megarl.algorithms import REGISTRY
    from megarl.config.args_file import Reader
    from megarl.config.loader import load_config

    config = load_config(jobs, REGISTRY, "megarl data", _REQUIRED, download=False)
    given = Reader()
    given.read(jobs)
    names = {one.base for one in given.occurrences}
    return DataArguments(
        files=(*config.data.train_data, *config.data.eval_data),
        model=config.model.model if "model" in names else None,
        tokenizer_model=config.model.tokenizer_model,
        prompt_key=config.data.prompt_key,
        max_prompt_length=config.sampling.max_prompt_length,
        max_response_length=config.sampling.max_response_length,
        default_lengths=_LENGTH_NAMES - {name.replace("-", "_") for name in names},
        needs=_needs(config) if "algorithm" in names else None,
        turns=getattr(config.algorithm, "train_turns", "last"),
        chat_template_args=config.model.chat_template_args,
    )


def _needs(config: TrainConfig) -> Needs:
    """Return the part that every row of a job's data must have besides the prompt.

    Raises: ConfigError if the file of --judge-template cannot be read."""
    from megarl.algorithms.base import algorithm_of
    from megarl.config.reward_models import needs_ground_truth

    algorithm = algorithm_of(config)
    if not algorithm.needs_rollout:
        return algorithm.row_needs
    try:
        return "ground_truth" if needs_ground_truth(config) else None
    except (OSError, UnicodeDecodeError) as error:
        path = config.reward_models.judge_template
        raise ConfigError(
            [f"--judge-template ({path}): cannot be read: {error}. Give a text file."]
        ) from error

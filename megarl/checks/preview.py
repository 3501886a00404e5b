"""Pass the first rows of the data through tokenizer and chat template, and check tokenizer against model.

All rows are read when the job starts."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.algorithms.base import algorithm_of
from megarl.checks.model_notes import lost_characters, lost_note
from megarl.config.environments import environments
from megarl.config.errors import ConfigError, Errors
from megarl.config.hf_config import ModelShape
from megarl.config.reward_models import needs_ground_truth, uses_rule_reward
from megarl.config.rules_files import DATA_SUFFIXES
from megarl.config.schema import TrainConfig
from megarl.data.columns import Needs, parse_row
from megarl.data.encoder import PromptEncoder
from megarl.data.env_rows import rows_errors
from megarl.data.hints import hint_errors
from megarl.data.prompts import PromptDataset
from megarl.data.quick_tokenizer import load_quickly
from megarl.data.readers import UnreadableFile, read_rows
from megarl.data.tokenizer import check_vocabulary
from megarl.data.tokenizer_base import Tokenizer
from megarl.rewards.pool import probe_rule
from megarl.rewards.routing import ROUTES, route

NUM_ROWS = 64
_NO_PROMPTS = ("data_source", "ability", "answer", "response", "solution")
"""Text columns that are not prompts."""


@dataclass
class Preview:
    """The errors of one actor's data, a summary of the data for people, and notes on what may be a
    mistake."""

    errors: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def preview(config: TrainConfig, calls_reward: bool = False) -> Preview:
    """Read the first rows of one actor's data, tokenize them, and return the errors with a summary.

    Args:
        calls_reward: whether to call the user's reward function for the first rows.

    Missing files are not reported here, because the rules of the configuration report them."""
    seen = Preview()
    datasets = _datasets(config, seen.errors)
    seen.errors += hint_errors(datasets.get("--train-data"), algorithm_of(config).teacher_hint_key)
    tokenizer = _tokenizer(config, seen)
    for flag, dataset in datasets.items():
        if flag != "--sft-data":
            seen.errors += _reward_errors(config, dataset, flag)
            seen.errors += rows_errors(environments(config.episodes), dataset, flag)
        if tokenizer is not None:
            try:
                encoder = PromptEncoder(tokenizer, dataset)
                encoder.check_prompt_lengths(config.sampling.max_prompt_length, flag)
                lengths = [len(ids) for ids in encoder.prompts(range(len(dataset)))]
                seen.lines.append(f"{flag}: prompts of {_range_of(lengths)} tokens in {dataset.counted_rows}")
                seen.notes += _length_notes(config, flag, dataset, tokenizer)
                if lost := lost_characters(tokenizer, _texts(dataset)):
                    seen.notes.append(lost_note(flag, _tokenizer_flag(config), lost))
            except ValueError as error:
                seen.errors.append(_with_flag(str(error), flag))
    if calls_reward and config.data.reward_function is not None and not seen.errors:
        try:
            probe_rule(config, [(rows, flag) for flag, rows in datasets.items() if flag != "--sft-data"])
        except ValueError as error:
            seen.errors.append(str(error))
    if {"--train-data", "--eval-data"} <= datasets.keys():
        seen.notes += _shared_prompts(datasets["--train-data"], datasets["--eval-data"])
    return seen


def _length_notes(
    config: TrainConfig, flag: str, dataset: PromptDataset, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield a note if every ground truth is longer than a response may be.

    Programs' tests are JSON, which no response repeats, so such ground truths are not compared."""
    answers = [row.ground_truth or "" for row in dataset]
    if flag == "--sft-data" or not config.algorithm.needs_rollout or not uses_rule_reward(config):
        return
    if any(answer.lstrip()[:1] in ("", "{", "[") for answer in answers):
        return
    limit, lengths = config.sampling.max_response_length, list(map(len, tokenizer.encode_responses(answers)))
    if min(lengths) > limit:
        yield (
            f"--max-response-length ({limit}): the ground truths in {dataset.counted_rows} of {flag} have "
            f"{_range_of(lengths)} tokens, so no response can repeat the right answer. Try "
            f"--max-response-length {max(lengths) + 1}"
        )


def _shared_prompts(train: PromptDataset, held_out: PromptDataset) -> Iterator[str]:
    """Yield a note if held-out prompts are among the training prompts."""
    known = {repr(row.messages) for row in train}
    shared = sum(repr(row.messages) in known for row in held_out)
    if shared:
        yield (
            f"--eval-data: prompts of {shared} of {held_out.counted_rows} are also in {train.counted_rows} "
            "of --train-data, and their scores do not show what was learnt beyond the training rows"
        )


def _range_of(numbers: Sequence[int]) -> str:
    """Return '4 to 7' for the smallest and the largest number, or '4' if they are equal."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _datasets(config: TrainConfig, errors: list[str]) -> dict[str, PromptDataset]:
    """Return flag -> the first rows of its files. A flag whose files have errors is left out, and they are
    added to `errors`."""
    needs: Needs = None if config.algorithm.needs_rollout else config.algorithm.row_needs
    try:
        needs = "ground_truth" if needs is None and needs_ground_truth(config) else needs
    except (OSError, UnicodeDecodeError):
        pass  # the file of --judge-template; a rule reports this error
    datasets = {}
    files_of = {"--train-data": config.data.train_data, "--eval-data": config.data.eval_data}
    for flag, names in (files_of | {"--sft-data": config.sft.sft_data}).items():
        needs_of: Needs = "response" if flag == "--sft-data" else needs
        files = [
            name for name in names if Path(name).is_file() and Path(name).suffix.lower() in DATA_SUFFIXES
        ]
        if not files:
            continue
        try:
            datasets[flag] = PromptDataset.load(
                files, prompt_key=config.data.prompt_key, needs=needs_of, flag=flag, first=NUM_ROWS
            )
        except ValueError as error:
            errors += _better_column(config, flag, files, needs_of) or [_with_flag(str(error), flag)]
    return datasets


def _better_column(config: TrainConfig, flag: str, files: Sequence[str], needs: Needs) -> list[str]:
    """Return an error with the right --prompt-key if only that flag is wrong, else []."""
    try:
        row = next((row for _, row in read_rows(files[0]) if isinstance(row, dict)), None)
    except UnreadableFile:
        return []
    if row is None or config.data.prompt_key in row:
        return []
    fits = [
        column
        for column in row
        if column not in _NO_PROMPTS
        and not parse_row({**row, "messages": None, "question": None, column: row[column]}, column, needs)[1]
    ]
    near = [*difflib.get_close_matches(config.data.prompt_key, fits, n=1), *fits]
    head = f"--prompt-key ({config.data.prompt_key}): {flag} ({files[0]}) has no such column"
    return [f"{head} (there: {', '.join(row)}). Try --prompt-key {near[0]}."] if near else []


def _texts(dataset: PromptDataset) -> Iterator[str]:
    """Yield the texts of the rows that the model reads or learns."""
    for row in dataset:
        messages = [{"content": row.messages}] if isinstance(row.messages, str) else row.messages
        yield from (message["content"] for message in messages)
        yield from (text for text in (row.response, row.chosen, row.rejected) if text is not None)


def _tokenizer_flag(config: TrainConfig) -> str:
    """Return the flag that names the tokenizer, with its value."""
    if config.model.tokenizer_model:
        return f"--tokenizer-model ({config.model.tokenizer_model})"
    return f"--model ({config.model.model})"


def _tokenizer(config: TrainConfig, seen: Preview) -> Tokenizer | None:
    flag = "--tokenizer-model" if config.model.tokenizer_model else "--model"
    path = config.model.tokenizer_model or config.model.model
    try:
        shape = ModelShape.load(config.model.model)
    except ConfigError:
        shape = None  # a rule of the configuration reports this error
    if not Path(path).exists() or shape is None and not config.model.tokenizer_model:
        return None
    try:
        tokenizer = load_quickly(path, flag)
        if tokenizer is None:
            seen.lines.append(
                f"{flag} ({path}): has no tokenizer.json; only transformers can read it, which "
                "happens when the job starts"
            )
            return None
        if shape is not None:
            check_vocabulary(tokenizer, shape.vocab_size, config.model.model)
            seen.errors += _special_ids(config, shape, tokenizer)
    except ValueError as error:
        seen.errors.append(_with_flag(str(error), flag, path))
        return None
    return tokenizer


def _special_ids(config: TrainConfig, shape: ModelShape, tokenizer: Tokenizer) -> Errors:
    """Yield an error if the end-of-sequence ids of model and tokenizer disagree.

    Engines stop at the model's ids, and fine-tuning ends its responses with the tokenizer's id."""
    source, ids = Path(config.model.model) / "config.json", shape.eos_token_ids
    flag = _tokenizer_flag(config)
    if above := [index for index in ids if index >= shape.vocab_size]:
        yield (
            f"--model ({config.model.model}): eos_token_id ({above[0]}) is not below vocab_size "
            f"({shape.vocab_size}). Correct {source}."
        )
    elif ids and tokenizer.eos_token_id not in ids and not config.algorithm.needs_rollout:
        yield (
            f"{flag}: ends responses with token {tokenizer.eos_token_id}, and the model's eos_token_id is "
            f"{' '.join(map(str, ids))}: what is learnt would stop no engine. Add {tokenizer.eos_token_id} "
            f"to eos_token_id in {source.with_name('generation_config.json')}."
        )


def _reward_errors(config: TrainConfig, dataset: PromptDataset, flag: str) -> Errors:
    """Yield an error for each data source that --reward auto has no rule for."""
    if (
        not config.algorithm.needs_rollout
        or config.episodes.has_turns
        or config.data.reward_function is not None
        or config.data.reward not in (None, "auto")
    ):
        return
    if not uses_rule_reward(config):
        return
    for source in dict.fromkeys(row.data_source for row in dataset):
        if not _is_routed(source):
            known = ", ".join(pattern for pattern, _ in ROUTES)
            yield (
                f"--reward (auto): no rule is known for data_source {source!r} of {flag} (known: {known}). "
                "Bring your own with --reward-function path/to/file.py:function, or name one of ours: "
                "--reward math."
            )


def _is_routed(source: str) -> bool:
    try:
        route(source)
    except ValueError:
        return False
    return True


def _with_flag(text: str, *flag: str) -> str:
    """Return an error with the flag in front, if it does not begin with a flag."""
    return text if text.startswith("--") else f"{flag[0]}{f' ({flag[1]})' if len(flag) > 1 else ''}: {text}"

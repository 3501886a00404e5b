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
from megarl.config.rules_files import is_data_file
from megarl.config.schema import TrainConfig
from megarl.data.columns import Needs, parse_row, text_of
from megarl.data.encoder import PromptEncoder, fitting
from megarl.data.env_rows import rows_errors
from megarl.data.hints import hint_errors
from megarl.data.prompts import PromptDataset
from megarl.data.quick_tokenizer import load_quickly
from megarl.data.readers import UnreadableFile, read_rows
from megarl.data.rendering import Turns
from megarl.data.tokenizer import check_vocabulary, tokenizer_of
from megarl.data.tokenizer_base import Tokenizer
from megarl.rewards.pool import probe_rule
from megarl.rewards.routing import ROUTES, route

NUM_ROWS = 64
_PROMPTS = ("prompt", "messages", "question", "problem", "instruction", "query", "input", "text", "context")
"""Names, or parts of names, of columns that may be prompts."""


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
                dataset = fitting(dataset, tokenizer, config, flag, seen.lines.append)
                encoder = PromptEncoder(tokenizer, dataset)
                lengths = [len(ids) for ids in encoder.prompts(range(len(dataset)))]
                seen.lines.append(f"{flag}: prompts of {_range_of(lengths)} tokens in {dataset.counted_rows}")
                seen.notes += _answer_notes(config, flag, encoder, len(dataset))
                seen.notes += _length_notes(config, flag, dataset, tokenizer)
                if lost := lost_characters(tokenizer, _texts(dataset)):
                    seen.notes.append(lost_note(flag, _tokenizer_flag(config), lost))
            except ValueError as error:
                seen.errors.append(_with_flag(str(error), flag))
        if count := sum(row.was_text for row in dataset):
            seen.notes.append(f"{flag}: the prompts of {count} rows are JSON text, which is read as messages")
    if calls_reward and config.data.reward_function is not None and not seen.errors:
        try:
            probe_rule(config, [(rows, flag) for flag, rows in datasets.items() if flag != "--sft-data"])
        except ValueError as error:
            seen.errors.append(str(error))
    if {"--train-data", "--eval-data"} <= datasets.keys():
        seen.notes += _shared_prompts(datasets["--train-data"], datasets["--eval-data"])
    return seen


def _answer_notes(config: TrainConfig, flag: str, encoder: PromptEncoder, num_rows: int) -> Iterator[str]:
    """Encode the answers that are trained on, and yield a note where the chat template writes their context
    otherwise. Raises: ValueError for a row that cannot be trained on."""
    algorithm = algorithm_of(config)
    needs = "response" if flag == "--sft-data" else None if algorithm.needs_rollout else algorithm.row_needs
    turns: Turns = "last"
    if needs == "response" and flag != "--sft-data":
        turns = config.algorithm.train_turns
    columns = {"response": ("response",), "labelled": ("response",), None: ()}.get(
        needs, ("chosen", "rejected")
    )
    for column in columns:
        encoder.answers(range(num_rows), column, turns, flag)
        if note := encoder.differences(column, turns, flag):
            yield note


def _length_notes(
    config: TrainConfig, flag: str, dataset: PromptDataset, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield a note if every ground truth is longer than a response may be.

    Programs' tests are JSON, which no response repeats, so such ground truths are not compared."""
    answers = [row.ground_truth if isinstance(row.ground_truth, str) else "" for row in dataset]
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
        files = [name for name in names if is_data_file(name)]
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
        if any(name in column.lower() for name in _PROMPTS)
        and not parse_row({**row, "messages": None, "question": None, column: row[column]}, column, needs)[1]
    ]
    near = [*difflib.get_close_matches(config.data.prompt_key, fits, n=1), *fits]
    head = f"--prompt-key ({config.data.prompt_key}): {flag} ({files[0]}) has no such column"
    return [f"{head} (there: {', '.join(row)}). Try --prompt-key {near[0]}."] if near else []


def _texts(dataset: PromptDataset) -> Iterator[str]:
    """Yield the texts of the rows that the model reads or learns."""
    for row in dataset:
        messages = [{"content": row.messages}] if isinstance(row.messages, str) else row.messages
        answers = (answer for answer in (row.response, row.chosen, row.rejected) if answer is not None)
        yield from (text_of(message) for message in (*messages, *answers))


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
        tokenizer = load_quickly(path, flag) if shape is None else tokenizer_of(config.model, load_quickly)
        if tokenizer is None:
            seen.lines.append(
                f"{flag} ({path}): has no tokenizer.json; only transformers can read it, which "
                "happens when the job starts"
            )
            return None
        if shape is not None:
            check_vocabulary(tokenizer, shape.vocab_size, config.model.model)
            _special_ids(config, shape, tokenizer, seen)
    except ValueError as error:
        seen.errors.append(_with_flag(str(error), flag, path))
        return None
    return tokenizer


def _special_ids(config: TrainConfig, shape: ModelShape, tokenizer: Tokenizer, seen: Preview) -> None:
    """Add an error for an end-of-sequence id of the model that its vocabulary does not have, and a note if
    the chat template ends turns with another token than the model's."""
    source, ids = Path(config.model.model) / "config.json", shape.eos_token_ids
    if above := [index for index in ids if index >= shape.vocab_size]:
        seen.errors.append(
            f"--model ({config.model.model}): eos_token_id ({above[0]}) is not below vocab_size "
            f"({shape.vocab_size}). Correct {source}."
        )
    elif tokenizer.turn_end not in ids:
        seen.notes.append(
            f"{_tokenizer_flag(config)}: turns end with token {tokenizer.turn_end}, which is not among the model's "
            f"eos_token_id ({' '.join(map(str, ids)) or 'none'}). Engines stop there too, and hf/generation_config.json "
            "will have it"
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

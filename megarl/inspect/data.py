"""Show data files as the model will see them, before any training.

    megarl data train.jsonl --model path/to/hf-model             counts, lengths, and the first rows
    megarl data train.jsonl test.jsonl --model M                 also the rows that both files have
    megarl data train.jsonl --model M --max-prompt-length 256    what is too long
    megarl data train.jsonl --model M --row 17 4000              these rows, with template and token ids

The files are read, the chat template is applied and the text is encoded by the code that trains. The exit
code is 2 if training would refuse the rows: such rows are listed."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from megarl.config.errors import ConfigError
from megarl.config.role_sections import SamplingConfig
from megarl.data.columns import Prompt
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset, read_prompts
from megarl.data.readers import UnreadableFile
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.inspect.arguments import Parser, whole
from megarl.inspect.models import base_model, checkpoint_of, model_folder
from megarl.inspect.terminal import block, fold, width, write

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
_NUM_LISTED = 5


@dataclass
class Files:
    """The rows of all files."""

    sizes: dict[str, int] = field(default_factory=dict)
    """File -> number of its rows."""
    prompts: list[Prompt] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """File and line of each prompt."""
    unusable: list[str] = field(default_factory=list)
    """Place and problems of each row that training refuses."""


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    files = _read(arguments.files, arguments.prompt_key)
    tokenizer = _tokenizer(arguments)
    encoder = PromptEncoder(tokenizer, PromptDataset(files.prompts))
    try:
        prompts = encoder.prompts(range(len(files.prompts)))
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    answered = [row for row, prompt in enumerate(files.prompts) if prompt.response is not None]
    # as fine-tuning learns them: with the end-of-sequence token
    responses = {
        row: [*ids, tokenizer.eos_token_id]
        for row, ids in zip(answered, encoder.responses(answered), strict=True)
    }
    shown = _rows_to_show(arguments, len(files.prompts))
    columns = width()
    write(_folded(_report(files, prompts, responses, arguments.max_prompt_length), columns))
    for row in shown:
        write(_row_lines(files, row, tokenizer, prompts[row], responses.get(row), columns))
    too_long = any(len(ids) > arguments.max_prompt_length for ids in prompts)
    return 2 if files.unusable or too_long else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    longest = SamplingConfig.__dataclass_fields__["max_prompt_length"].default
    parser = Parser("data", __doc__)
    parser.add_argument("files", metavar="FILE", nargs="+", help="*.jsonl or *.parquet")
    parser.add_argument("--model", help="a Hugging Face folder or a run, for its tokenizer")
    parser.add_argument("--tokenizer-model", help="the tokenizer, if it is not in --model")
    parser.add_argument("--prompt-key", default="prompt", help="column of the prompt; default: prompt")
    parser.add_argument(
        "--max-prompt-length", type=whole(1, longest), default=longest, help=f"tokens; default: {longest}"
    )
    parser.add_argument("--rows", type=whole(0, 3), default=3, help="show the first so many; default: 3")
    parser.add_argument("--row", type=whole(0, 0), nargs="+", help="show these rows, counted from 0")
    arguments = parser.parse(argv)
    if arguments.model is None and arguments.tokenizer_model is None:
        raise ConfigError(["--model: is required for its tokenizer. Give a Hugging Face folder or a run."])
    return arguments


def _read(paths: Sequence[str], prompt_key: str) -> Files:
    files, errors = Files(), []
    for path in paths:
        files.sizes[path] = 0
        try:
            for place, prompt, problems in read_prompts(path, prompt_key, None):
                files.sizes[path] += 1
                if problems:
                    files.unusable.append(f"{place}: {'; '.join(problems)}")
                else:
                    prompt.index = len(files.prompts)
                    files.prompts.append(prompt)
                    files.places.append(place)
        except UnreadableFile as error:
            errors.append(f"FILE ({path}): {error}")
    if errors:
        raise ConfigError(errors)
    return files


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    path, flag = arguments.tokenizer_model, "--tokenizer-model"
    if path is None:
        folder = model_folder(arguments.model)
        path, flag = str(folder or base_model(checkpoint_of(arguments.model))), "--model"
    try:
        return load_tokenizer(path, flag)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def _rows_to_show(arguments: argparse.Namespace, num_rows: int) -> Iterable[int]:
    if arguments.row is None:
        return range(min(arguments.rows, num_rows))
    for row in arguments.row:
        if row >= num_rows:
            rule = f"must be below {num_rows}, the number of usable rows"
            raise ConfigError([f"--row ({row}): {rule}. Try {max(0, num_rows - 1)}."])
    return arguments.row


# ------------------------------------------------------------------ the report


def _report(
    files: Files, prompts: list[list[int]], responses: dict[int, list[int]], max_prompt_length: int
) -> Iterator[str]:
    yield "files"
    yield from (f"  {path}: {size} rows" for path, size in files.sizes.items())
    yield f"rows: {len(files.prompts)} can be used, {len(files.unusable)} cannot"
    yield from _listed(files.unusable)
    if not files.prompts:
        return
    yield "filled columns"
    yield from (f"  {line}" for line in _filled(files.prompts))
    lengths = [len(ids) for ids in prompts]
    yield "tokens"
    yield f"  prompt: {_quantiles(lengths)}"
    if responses:
        yield f"  response, with end-of-sequence: {_quantiles([len(ids) for ids in responses.values()])}"
    yield from _too_long(files, lengths, max_prompt_length)
    yield from _duplicates(files)
    empty = [row for row, prompt in enumerate(files.prompts) if _is_empty(prompt)]
    yield f"empty: {len(empty)} prompts have a message or a text without characters"
    yield from _listed([_named(files, row) for row in empty])
    yield "longest prompts"
    longest = sorted(range(len(lengths)), key=lambda row: -lengths[row])[:_NUM_LISTED]
    yield from (f"  {_named(files, row)}: {lengths[row]} tokens" for row in longest)


def _filled(prompts: Sequence[Prompt]) -> Iterator[str]:
    sources = Counter(prompt.data_source for prompt in prompts if prompt.data_source)
    named = ", ".join(f"{source} {count}" for source, count in sources.most_common(_NUM_LISTED))
    yield f"data_source: {sources.total()} rows" + (f" ({named})" if named else "")
    yield f"ground truth: {sum(prompt.ground_truth is not None for prompt in prompts)} rows"
    yield f"response: {sum(prompt.response is not None for prompt in prompts)} rows"
    yield f"extra_info: {sum(bool(prompt.extra_info) for prompt in prompts)} rows"


def _quantiles(values: Sequence[int]) -> str:
    ordered = sorted(values)
    texts = []
    for share in QUANTILES:
        name = {0.0: "shortest", 1.0: "longest"}.get(share, f"{share:.0%}")
        texts.append(f"{name} {ordered[round(share * (len(ordered) - 1))]}")
    return ", ".join(texts)


def _too_long(files: Files, lengths: Sequence[int], max_prompt_length: int) -> Iterator[str]:
    long = [row for row, length in enumerate(lengths) if length > max_prompt_length]
    consequence = f": training refuses them. Try --max-prompt-length {max(lengths)}" if long else ""
    limit = f"--max-prompt-length ({max_prompt_length})"
    yield f"too long: {len(long)} prompts have more than {limit}{consequence}"
    yield from _listed([f"{_named(files, row)}: {lengths[row]} tokens" for row in long])


def _duplicates(files: Files) -> Iterator[str]:
    """Yield the prompts that several rows have; those whose ground truths or responses differ come first."""
    rows_of: dict[str, list[int]] = {}
    for row, prompt in enumerate(files.prompts):
        rows_of.setdefault(json.dumps(prompt.messages, sort_keys=True), []).append(row)
    lines = []
    for rows in rows_of.values():
        if len(rows) > 1:
            answers = {(files.prompts[row].ground_truth, files.prompts[row].response) for row in rows}
            named = ", ".join(_named(files, row) for row in rows[:_NUM_LISTED])
            more = ", ..." if rows[_NUM_LISTED:] else ""
            lines.append(
                (len(answers) == 1, f"{named}{more}{'' if len(answers) == 1 else ': answers differ'}")
            )
    different = sum(not same for same, _ in lines)
    differing = f"; the answers differ in {different} of them" if lines else ""
    yield f"duplicates: {len(lines)} prompts are in several rows{differing}"
    yield from _listed([line for _, line in sorted(lines, key=lambda one: one[0])])


def _is_empty(prompt: Prompt) -> bool:
    if isinstance(prompt.messages, str):
        return not prompt.messages.strip()
    return any(not str(message.get("content") or "").strip() for message in prompt.messages)


def _named(files: Files, row: int) -> str:
    return f"row {row} ({files.places[row]})"


def _listed(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"  {line}" for line in lines[:_NUM_LISTED])
    if lines[_NUM_LISTED:]:
        yield f"  and {len(lines) - _NUM_LISTED} more"


def _folded(lines: Iterable[str], columns: int) -> Iterator[str]:
    for line in lines:
        yield from fold(line, columns)


def _row_lines(
    files: Files, row: int, tokenizer: Tokenizer, ids: list[int], response: list[int] | None, columns: int
) -> Iterator[str]:
    prompt = files.prompts[row]
    yield ""
    yield from fold(f"-- {_named(files, row)} | {prompt.data_source or 'no data_source'}", columns)
    yield from block("prompt as the model reads it", tokenizer.render(prompt.messages), columns)
    yield from block(f"token ids ({len(ids)})", " ".join(map(str, ids)), columns)
    if response is not None:
        yield from block("response", prompt.response, columns)
        yield from block(f"token ids ({len(response)})", " ".join(map(str, response)), columns)
    if prompt.ground_truth is not None:
        yield from block("ground truth", prompt.ground_truth, columns)

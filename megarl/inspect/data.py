"""Show data files as the model will see them, before any training.

    megarl data train.jsonl --model path/to/hf-model             counts, lengths, and the first rows
    megarl data train.jsonl test.jsonl --model M                 also the rows that both files have
    megarl data train.jsonl --model M --max-prompt-length 256    what is too long
    megarl data train.jsonl --model M --row 17 4000              these rows, with template and token ids
    megarl data @job.args                                        the files, tokenizer and lengths of a job
    megarl data train.jsonl --model M --out clean.jsonl          also writes the rows that training takes
    megarl data @job.args other.jsonl --model M                  the same job, with another file and tokenizer

The files are read, the chat template is applied and the text is encoded by the code that trains. The exit
code is 2 if training would refuse the rows: such rows are listed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megarl.config.errors import ConfigError
from megarl.data.columns import Prompt
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset, read_prompts
from megarl.data.readers import UnreadableFile, read_rows
from megarl.data.rendering import difference, encode_parts, parts_of
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.inspect.data_arguments import DataArguments, parse
from megarl.inspect.progress import Progress
from megarl.inspect.models import base_model, checkpoint_of, model_folder, tokenizer_of_run
from megarl.inspect.terminal import block, fold, width, write

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
_NUM_LISTED = 5
_NUM_ROWS_AT_ONCE = 1000


@dataclass
class Files:
    """The rows of all data files, and the problems of those that cannot be used."""

    sizes: dict[str, int] = field(default_factory=dict)
    """File -> number of its rows."""
    prompts: list[Prompt] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """File and line of each prompt."""
    unusable: list[str] = field(default_factory=list)
    """Place and problems of each row that training refuses."""
    told: str | None = None
    """How the first sample differs from what the chat template writes for its whole conversation."""


class Answer(NamedTuple):
    """What a job trains on of a row: the text as the chat template writes it, and its token ids."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Tokens:
    """Token ids of all usable rows, as a job reads them."""

    prompts: list[list[int]]
    responses: dict[int, Answer]
    """Row -> its response, if it has one."""
    pairs: dict[int, tuple[Answer, Answer]]
    """Row -> its chosen and its rejected answer, if it has them."""
    ground_truths: dict[int, int]
    """Row -> number of tokens of its ground truth, if that is an answer and no JSON object."""


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv, __doc__)
    with Progress() as progress:
        files = _read(arguments, progress)
        progress.text = "loading the tokenizer"
        tokenizer = _tokenizer(arguments)
        tokens = _encode(files, tokenizer, arguments, progress)
    shown = _rows_to_show(arguments, len(files.prompts))
    columns = width()
    write(_folded(_report(files, tokens, arguments), columns))
    for row in shown:
        write(_row_lines(files, row, tokenizer, tokens, columns))
    long = [row for row, ids in enumerate(tokens.prompts) if len(ids) > arguments.max_prompt_length]
    if arguments.out is not None:
        write(_write_others(files, long, tokens, arguments.out))
        return 0
    return 2 if files.unusable or long else 0


def _write_others(files: Files, long: Sequence[int], tokens: Tokens, out: str) -> Iterator[str]:
    """Write all rows but the long and the unusable ones into a new file, and yield what is left out, and why.

    Raises: ConfigError if the file cannot be written."""
    kept = {*files.places} - {files.places[row] for row in long}
    try:
        with open(out, "x", encoding="utf-8") as file:
            for place, row in (found for path in files.sizes for found in read_rows(path)):
                if place in kept:
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    except OSError as error:
        rule = f"cannot be written: {error.strerror}. Name a new *.jsonl file."
        raise ConfigError([f"--out ({out}): {rule}"]) from error
    yield f"{out}: {len(kept)} rows; left out are {len(files.unusable) + len(long)}"
    yield from (f"  {line}" for line in files.unusable)
    yield from (f"  {files.places[row]}: the prompt has {len(tokens.prompts[row])} tokens" for row in long)


def _encode(files: Files, tokenizer: Tokenizer, arguments: DataArguments, progress: Progress) -> Tokens:
    """Return the token ids of all rows. Rows whose answers cannot be trained on become unusable.

    Raises: ConfigError if the chat template fails for a prompt."""
    prompts = files.prompts
    encoder = PromptEncoder(tokenizer, PromptDataset(prompts))
    prompt_ids: list[list[int]] = []
    try:
        for first in range(0, len(prompts), _NUM_ROWS_AT_ONCE):
            progress.text = f"encoding: {first} of {len(prompts)} prompts"
            prompt_ids += encoder.prompts(range(len(prompts))[first : first + _NUM_ROWS_AT_ONCE])
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    progress.text = "encoding the responses and ground truths"
    responses, chosen, rejected = (
        _answers(files, tokenizer, column, arguments) for column in ("response", "chosen", "rejected")
    )
    pairs = {row: (answer, rejected[row]) for row, answer in chosen.items() if row in rejected}
    answers = {
        row: prompt.ground_truth for row, prompt in enumerate(prompts) if _is_answer(prompt.ground_truth)
    }
    lengths = map(len, tokenizer.encode_responses(list(answers.values())))
    return Tokens(prompt_ids, responses, pairs, dict(zip(answers, lengths, strict=True)))


def _answers(files: Files, tokenizer: Tokenizer, column: str, arguments: DataArguments) -> dict[int, Answer]:
    """Return row -> its answer in a column, as a job trains on it. Rows that no job can train on, and the
    first one whose context the chat template writes otherwise, are noted."""
    found, turns = {}, arguments.turns if column == "response" else "last"
    for row, prompt in enumerate(files.prompts):
        if (answer := getattr(prompt, column)) is None or arguments.needs == "ground_truth":
            continue
        try:
            parts = parts_of(tokenizer, prompt, answer, turns)
            told = files.told or difference(tokenizer, prompt, answer, turns)
        except ValueError as error:
            files.unusable.append(f"{files.places[row]}: {error}")
            continue
        files.told = told if not told or files.told else f"{_named(files, row)}: {told}"
        (sample,) = encode_parts(tokenizer, [parts])
        found[row] = Answer("".join(part.text for part in parts[1:]), sample.response)
    return found


def _is_answer(ground_truth: object) -> bool:
    """Return whether a ground truth is a text that a response may repeat. The tests of a program are a JSON
    object, which no response repeats."""
    if not isinstance(ground_truth, str) or not ground_truth.lstrip().startswith("{"):
        return isinstance(ground_truth, str)
    try:
        return not isinstance(json.loads(ground_truth), dict)
    except (ValueError, RecursionError):
        return True


def _read(arguments: DataArguments, progress: Progress) -> Files:
    files, errors = Files(), []
    for path in arguments.files:
        files.sizes[path] = 0
        try:
            for place, prompt, problems in read_prompts(path, arguments.prompt_key, arguments.needs):
                files.sizes[path] += 1
                if files.sizes[path] % _NUM_ROWS_AT_ONCE == 1:
                    progress.text = f"reading {path}: {files.sizes[path] - 1} rows"
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


def _tokenizer(arguments: DataArguments) -> Tokenizer:
    path, flag = arguments.tokenizer_model, "--tokenizer-model"
    if path is None:
        folder, flag = model_folder(arguments.model), "--model"
        if folder is None:
            checkpoint = checkpoint_of(Path(arguments.model))
            folder = tokenizer_of_run(checkpoint) or base_model(checkpoint)
        path = str(folder)
    try:
        tokenizer = load_tokenizer(path, flag)
        tokenizer.template_arguments = arguments.chat_template_args
        return tokenizer
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def _rows_to_show(arguments: DataArguments, num_rows: int) -> Iterable[int]:
    if arguments.row is None:
        return range(min(arguments.rows, num_rows))
    for row in arguments.row:
        if row >= num_rows:
            rule = f"must be below {num_rows}, the number of usable rows"
            raise ConfigError([f"--row ({row}): {rule}. Try {max(0, num_rows - 1)}."])
    return arguments.row


# ------------------------------------------------------------------ the report


def _report(files: Files, tokens: Tokens, arguments: DataArguments) -> Iterator[str]:
    yield "files"
    yield from (f"  {path}: {size} rows" for path, size in files.sizes.items())
    yield f"rows: {len(files.prompts)} can be used, {len(files.unusable)} cannot"
    yield from _listed(files.unusable)
    if not files.prompts:
        return
    yield "filled columns"
    yield from (f"  {line}" for line in _filled(files.prompts))
    lengths = [len(ids) for ids in tokens.prompts]
    responses = {row: len(answer.ids) for row, answer in tokens.responses.items()}
    answers = tokens.ground_truths
    yield "tokens"
    yield f"  prompt: {_quantiles(lengths)}"
    if responses:
        yield f"  response, with end-of-sequence: {_quantiles(list(responses.values()))}"
    for side, name in enumerate(("chosen", "rejected")):
        if tokens.pairs:
            lengths_of_side = [len(pair[side].ids) for pair in tokens.pairs.values()]
            yield f"  {name}, with end-of-sequence: {_quantiles(lengths_of_side)}"
    if answers:
        shortest, longest = min(answers.values()), max(answers.values())
        mean = sum(answers.values()) / len(answers)
        yield f"  ground truth: shortest {shortest}, mean {mean:.1f}, longest {longest}"
    defaults = arguments.default_lengths
    yield from _too_long(files, lengths, arguments.max_prompt_length, "max_prompt_length" in defaults)
    is_default = "max_response_length" in defaults
    yield from _too_long_for_responses(files, responses, answers, arguments.max_response_length, is_default)
    if files.told:
        yield f"context: {files.told}"
    yield from _duplicates(files)
    if tokens.pairs:
        equal = [row for row, (chosen, rejected) in tokens.pairs.items() if chosen == rejected]
        yield f"equal pairs: {len(equal)} rows have the same text as chosen and as rejected, which teaches nothing"
        yield from _listed([_named(files, row) for row in equal])
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
    if pairs := sum(prompt.chosen is not None for prompt in prompts):
        scored = sum(prompt.score_chosen is not None for prompt in prompts)
        yield f"chosen and rejected: {pairs} rows, {scored} with scores"
    yield f"extra_info: {sum(bool(prompt.extra_info) for prompt in prompts)} rows"


def _quantiles(values: Sequence[int]) -> str:
    ordered = sorted(values)
    texts = []
    for share in QUANTILES:
        name = {0.0: "shortest", 1.0: "longest"}.get(share, f"{share:.0%}")
        texts.append(f"{name} {ordered[round(share * (len(ordered) - 1))]}")
    return ", ".join(texts)


def _limit(flag: str, value: int, is_default: bool) -> str:
    """Return a flag with its value, and where the value comes from if nobody has given it."""
    origin = ", the default: give the flag, or @job.args of your job" if is_default else ""
    return f"{flag} ({value}{origin})"


def _too_long(
    files: Files, lengths: Sequence[int], max_prompt_length: int, is_default: bool
) -> Iterator[str]:
    long = [row for row, length in enumerate(lengths) if length > max_prompt_length]
    consequence = f": training refuses them. Try --max-prompt-length {max(lengths)}" if long else ""
    limit = _limit("--max-prompt-length", max_prompt_length, is_default)
    yield f"too long: {len(long)} prompts have more than {limit}{consequence}"
    yield from _listed([f"{_named(files, row)}: {lengths[row]} tokens" for row in long])


def _too_long_for_responses(
    files: Files,
    responses: Mapping[int, int],
    answers: Mapping[int, int],
    max_response_length: int,
    is_default: bool,
) -> Iterator[str]:
    """Yield how many responses and ground truths have more tokens than a sampled response may have.

    Args:
        responses, answers: row -> number of tokens.
        is_default: whether the limit is the flag's default."""
    limit = _limit("--max-response-length", max_response_length, is_default)
    if responses:
        long = [row for row, length in responses.items() if length > max_response_length]
        advice = f"Try --max-response-length {max(responses.values())}"
        consequence = f": fine-tuning learns all of them, but sampled responses are cut there. {advice}"
        yield f"too long: {len(long)} responses have more than {limit}{consequence if long else ''}"
        yield from _listed([f"{_named(files, row)}: {responses[row]} tokens" for row in long])
    long = [row for row, length in answers.items() if length > max_response_length]
    if long:
        advice = f"Try --max-response-length {max(answers.values()) + 1}"  # and end-of-sequence
        consequence = "so no response of these rows can repeat the right answer"
        yield f"too long: {len(long)} ground truths have more than {limit}, {consequence}. {advice}"
        yield from _listed([f"{_named(files, row)}: {answers[row]} tokens" for row in long])


def _duplicates(files: Files) -> Iterator[str]:
    """Yield the prompts that several rows have; those whose ground truths or responses differ come first."""
    rows_of: dict[str, list[int]] = {}
    for row, prompt in enumerate(files.prompts):
        rows_of.setdefault(json.dumps(prompt.messages, sort_keys=True), []).append(row)
    lines = []
    for rows in rows_of.values():
        if len(rows) > 1:
            answers = {
                json.dumps(
                    [prompt.ground_truth, prompt.response, prompt.chosen, prompt.rejected], default=str
                )
                for prompt in (files.prompts[row] for row in rows)
            }
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
    """Yield the lines, each at most so many columns wide. A line that continues another is indented more."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip(" ")))
        first, *others = fold(line.removeprefix(indent), columns - len(indent) - 2)
        yield f"{indent}{first}"
        yield from (f"{indent}  {other}" for other in others)


def _row_lines(files: Files, row: int, tokenizer: Tokenizer, tokens: Tokens, columns: int) -> Iterator[str]:
    prompt, ids, response = files.prompts[row], tokens.prompts[row], tokens.responses.get(row)
    yield ""
    yield from fold(f"-- {_named(files, row)} | {prompt.data_source or 'no data_source'}", columns)
    text = tokenizer.render(prompt.messages, prompt.tools, prompt.template_arguments)
    yield from block("prompt as the model reads it", text, columns)
    yield from block(f"token ids ({len(ids)})", " ".join(map(str, ids)), columns)
    answers = {"response": response} | dict(zip(("chosen", "rejected"), tokens.pairs.get(row, ())))
    for name, answer in answers.items():
        if answer is not None:
            yield from block(name, answer.text, columns)
            yield from block(f"token ids ({len(answer.ids)})", " ".join(map(str, answer.ids)), columns)
    if prompt.ground_truth is not None:
        yield from block("ground truth", str(prompt.ground_truth), columns)

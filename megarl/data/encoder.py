"""Encode the rows of a dataset as token ids, each row once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from megarl.config.schema import TrainConfig
from megarl.data.columns import Needs
from megarl.data.prompts import PromptDataset
from megarl.data.rendering import RowSample, Turns, difference, encode_parts, parts_of
from megarl.data.tokenizer import Tokenizer, tokenizer_of

_NUM_LONG_ROWS_SHOWN = 5


class PromptEncoder:
    """Encodes rows of a dataset as token ids. It keeps those of prompts, so that each is encoded once."""

    def __init__(self, tokenizer: Tokenizer, dataset: PromptDataset):
        self._tokenizer, self._dataset = tokenizer, dataset
        # 4 bytes per token: lists of Python ints would take ten times as much.
        self._prompts: dict[int, array[int]] = {}

    def prompts(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the token ids of the prompts in these rows, up to and including the assistant's header."""
        known, tokenizer = self._prompts, self._tokenizer
        new = [row for row in dict.fromkeys(rows) if row not in known]
        prompts = [self._dataset[row] for row in new]
        texts = [tokenizer.render(one.messages, one.tools, one.template_arguments) for one in prompts]
        ids = tokenizer.encode_rendered(texts, [isinstance(one.messages, str) for one in prompts])
        known |= {row: array("i", of_row) for row, of_row in zip(new, ids, strict=True)}
        return [known[row].tolist() for row in rows]

    def answers(
        self, rows: Sequence[int], column: str = "response", turns: Turns = "last", flag: str = "--train-data"
    ) -> list[RowSample]:
        """Return the samples of rows with an answer, as the chat template writes the conversation.

        Args:
            column: name of the answer in a `Prompt`: response, chosen or rejected.
            turns: the answers that are trained on.
        Raises: ValueError naming the place of a row that cannot be trained on as the template writes it."""
        parts = []
        for row in rows:
            prompt = self._dataset[row]
            try:
                parts.append(parts_of(self._tokenizer, prompt, getattr(prompt, column), turns))
            except ValueError as error:
                raise ValueError(f"{flag}: {self._dataset.places([row])[0]}: {error}") from error
        return encode_parts(self._tokenizer, parts)

    def differences(self, column: str, turns: Turns, flag: str) -> str | None:
        """Return a note on the rows whose samples differ from what the chat template writes for the whole
        conversation; None if none does."""
        rows = enumerate(self._dataset)
        found = {row: difference(self._tokenizer, one, getattr(one, column), turns) for row, one in rows}
        differing = [row for row, words in found.items() if words]
        if not differing:
            return None
        first = f"{self._dataset.places(differing[:1])[0]}: {found[differing[0]]}"
        return f"{flag}: the context of answers in {len(differing)} of {self._dataset.counted_rows}: {first}"

    def check_prompt_lengths(self, max_prompt_length: int, flag: str = "--train-data") -> None:
        """Encode every row before training starts, and raise ValueError if a prompt is longer than allowed.

        Raises: ValueError with the number of long prompts, the places of the first few, and a length that
            suffices.
        """
        lengths = [len(ids) for ids in self.prompts(range(len(self._dataset)))]
        long = [row for row, length in enumerate(lengths) if length > max_prompt_length]
        if long:
            rows = long[:_NUM_LONG_ROWS_SHOWN]
            places = zip(self._dataset.places(rows), rows, strict=True)
            shown = ", ".join(f"{place} ({lengths[row]} tokens)" for place, row in places)
            raise ValueError(
                f"--max-prompt-length ({max_prompt_length}): {len(long)} of {self._dataset.counted_rows} of "
                f"{flag} have longer prompts: {shown}{', ...' if len(long) > len(rows) else ''}. "
                f"Try {max(lengths)}, or --filter-long-prompts, which leaves them out."
            )


def load_rows(
    config: TrainConfig, files: Sequence[str], needs: Needs = None, flag: str = "--train-data"
) -> PromptDataset:
    """Return the rows of data files that a job uses. Raises: as `PromptDataset.load`."""
    dataset = PromptDataset.load(files, config.data.prompt_key, needs, flag)
    if not config.data.filter_long_prompts:
        return dataset
    return fitting(dataset, tokenizer_of(config.model), config)


def fitting(
    dataset: PromptDataset,
    tokenizer: Tokenizer,
    config: TrainConfig,
    flag: str = "--train-data",
    say: Callable[[str], object] = lambda text: None,
) -> PromptDataset:
    """Return the rows without those that --filter-long-prompts leaves out.

    Args:
        say: shows how many rows these are.
    Raises: ValueError for prompts that are too long, without that flag or if no row would be left."""
    encoder, limit = PromptEncoder(tokenizer, dataset), config.sampling.max_prompt_length
    if config.data.filter_long_prompts:
        ids = encoder.prompts(range(len(dataset)))
        rows = [row for row, prompt in enumerate(ids) if len(prompt) <= limit]
        if 0 < len(rows) < len(ids):
            number = len(ids) - len(rows)
            say(f"{flag}: {number} of {dataset.counted_rows} are left out by --filter-long-prompts")
            return dataset.only(rows)
    encoder.check_prompt_lengths(limit, flag)
    return dataset

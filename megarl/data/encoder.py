"""Encode the rows of a dataset as token ids, each row once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from megarl.config.schema import TrainConfig
from megarl.data.columns import Needs
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import Tokenizer, load_tokenizer

_NUM_LONG_ROWS_SHOWN = 5


class PromptEncoder:
    """Encodes rows of a dataset as token ids and keeps them, so that each row is encoded once."""

    def __init__(self, tokenizer: Tokenizer, dataset: PromptDataset):
        self._tokenizer, self._dataset = tokenizer, dataset
        # 4 bytes per token: lists of Python ints would take ten times as much.
        self._prompts: dict[int, array[int]] = {}
        self._responses: dict[int, array[int]] = {}
        self._chosen: dict[int, array[int]] = {}
        self._rejected: dict[int, array[int]] = {}

    def prompts(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the token ids of the prompts in these rows, up to and including the assistant's header."""
        return self._encoded(rows, self._prompts, "messages", self._tokenizer.encode_prompts)

    def responses(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the token ids of the responses in these rows, without end-of-sequence.

        The dataset must have been loaded with needs="response"."""
        return self._encoded(rows, self._responses, "response", self._tokenizer.encode_responses)

    def pairs(self, rows: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Return the token ids of the chosen and the rejected answer of these rows, without end-of-sequence.

        The dataset must have been loaded with needs="pair"."""
        encode = self._tokenizer.encode_responses
        chosen = self._encoded(rows, self._chosen, "chosen", encode)
        return list(zip(chosen, self._encoded(rows, self._rejected, "rejected", encode), strict=True))

    def _encoded(
        self,
        rows: Sequence[int],
        known: dict[int, array[int]],
        field: str,
        encode: Callable[[list], list[list[int]]],
    ) -> list[list[int]]:
        """Return the token ids of a field of these rows. Encodes rows that are not known yet."""
        new = [row for row in dict.fromkeys(rows) if row not in known]
        ids = encode([getattr(self._dataset[row], field) for row in new])
        known |= {row: array("i", of_row) for row, of_row in zip(new, ids, strict=True)}
        return [known[row].tolist() for row in rows]

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
    return fitting(dataset, load_tokenizer(config.model.tokenizer_model or config.model.model), config)


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

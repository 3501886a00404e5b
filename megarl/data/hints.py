"""Extend the prompts of rows by hints that only a teacher reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megarl.data.columns import Prompt
from megarl.data.prompts import PromptDataset


def with_hint(row: Prompt, key: str) -> Prompt:
    """Return the row with a prompt that ends with the text `key` of its extra_info, after a blank line.

    Raises: ValueError if the row has no such text."""
    hint = row.extra_info.get(key)
    if not isinstance(hint, str) or not hint:
        raise ValueError(f"extra_info.{key} is {hint!r}, wanted a string that is not empty")
    if isinstance(row.messages, str):
        return replace(row, messages=f"{row.messages}\n\n{hint}")
    *before, last = row.messages
    return replace(row, messages=(*before, last | {"content": f"{last['content']}\n\n{hint}"}))


def hinted_rows(dataset: PromptDataset, key: str) -> PromptDataset:
    """Return the rows of --train-data with their hints. Raises ValueError naming the first row without
    one."""
    rows = []
    for row, prompt in enumerate(dataset):
        try:
            rows.append(with_hint(prompt, key))
        except ValueError as error:
            where = dataset.places([row])[0]
            raise ValueError(
                f"--teacher-hint-key ({key}): {where} of --train-data: {error}. Name a text that every row has."
            ) from error
    return PromptDataset(rows)


def hint_errors(dataset: PromptDataset | None, key: str | None) -> Iterator[str]:
    """Yield an error if a row has no hint. Without a key there is nothing to check."""
    if dataset is not None and key is not None:
        try:
            hinted_rows(dataset, key)
        except ValueError as error:
            yield str(error)

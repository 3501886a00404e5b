"""Turn rows of a data set into samples with a prompt and a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megarl.batch import Batch
from megarl.data.encoder import PromptEncoder


class RowSample(NamedTuple):
    """The token ids and the reward of one sample of a row of the data."""

    prompt: list[int]
    response: list[int]
    """Everything after the prompt, with the end of sequence."""
    reward: float | None = None
    holes: tuple[tuple[int, int], ...] = ()
    """(start, end) in the response of the ids that are context and not trained on."""

    @property
    def num_trained(self) -> int:
        return len(self.response) - sum(end - start for start, end in self.holes)


def last_turns(encoder: PromptEncoder, num_rows: int, eos: int) -> list[RowSample]:
    """Return the sample of each row: its prompt, and its response with the end of sequence `eos`."""
    rows = range(num_rows)
    pairs = zip(encoder.prompts(rows), encoder.responses(rows), strict=True)
    return [RowSample(prompt, [*ids, eos]) for prompt, ids in pairs]


def batch_of_rows(sample_ids: Sequence[int], samples: Sequence[RowSample]) -> Batch:
    """Return the samples as one batch, in this order."""
    return Batch.from_samples(
        list(sample_ids),
        [one.prompt for one in samples],
        [one.response for one in samples],
        holes=[one.holes for one in samples],
    )

"""Define the sections of the configuration tree about further data, and about the order of rows.

Each field is one flag, see schema.py."""

from __future__ import annotations

from typing import Literal

from megarl.config.errors import Count, Positive, Section, section


@section
class SftConfig(Section):
    """fine-tuning mixed into RL"""

    sft_data: tuple[str, ...] = ()
    """Files whose responses are learnt by cross-entropy in the same updates as the sampled ones, with rows as
    --algorithm sft reads them (prompt and response, or messages). Default: none. Not run on a GPU yet."""
    sft_coef: Positive = 0.1
    """Factor of the mean cross-entropy over the response tokens of --sft-data in an update. The policy's loss has
    its own denominator."""
    sft_batch_size: Count = 16
    """Rows of --sft-data in each optimizer update, over all ranks."""


@section
class CurriculumConfig(Section):
    """order of the prompts by measured difficulty"""

    curriculum: Literal["shuffled", "easy-first", "hard-first"] = "shuffled"
    """Order of the rows of a pass over --train-data. easy-first and hard-first: by the mean reward of each row's
    last responses, the highest or the lowest first, from the second pass on."""
    difficulty_min: float | None = None
    """A row whose last responses had a mean reward of at most this is too hard, and rests for --difficulty-rest
    passes, e.g. 0. Default: none."""
    difficulty_max: float | None = None
    """A row whose last responses had a mean reward of at least this is too easy, and rests likewise, e.g. 1.
    Default: none."""
    difficulty_rest: Count = 1
    """Passes over the data that such a row is left out of. It is then sampled, and measured again."""

    @property
    def is_measured(self) -> bool:
        """Whether rewards decide which rows come next."""
        return (
            self.curriculum != "shuffled"
            or self.difficulty_min is not None
            or self.difficulty_max is not None
        )

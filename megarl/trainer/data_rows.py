"""Plan which rows of the data an update learns from: rows of --sft-data, and those of fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.schema import TrainConfig
from megarl.data.cursor import DataCursor
from megarl.packing import MiniBatch, Sample, plan_mini_batches


class SftRows:
    """The walk over --sft-data of an actor, and the sizes of its rows.

    Args:
        num_rows: rows of --sft-data."""

    def __init__(self, config: TrainConfig, num_rows: int) -> None:
        self._config = config
        self._cursor = DataCursor(num_rows, f"{config.batch.seed}/sft", config.data.shuffle)
        self.sizes: Sequence[tuple[int, int]] = ()
        """(length, response length) of every row; the actor tells them."""

    def next(self, num_updates: int, dp: int, hidden_size: int) -> tuple[dict[int, int], list[MiniBatch]]:
        """Return visit -> row of the rows of a step, and one mini-batch of them for each update of an epoch."""
        size = self._config.sft.sft_batch_size
        visits = self._cursor.next_visits(num_updates * size)
        samples = [Sample(visit, *self.sizes[row]) for visit, row in visits.items()]
        return visits, plan_rows(samples, size, dp, self._config, hidden_size)

    def state(self) -> dict[str, Any]:
        """Return the position as values that JSON can hold, for `restore`."""
        return self._cursor.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state()` was taken. Raises: ValueError if the number of rows has changed."""
        if state["num_rows"] != self._cursor.num_rows:
            raise ValueError(
                f"--sft-data: the files have {self._cursor.num_rows} rows, and the checkpoint was made with "
                f"{state['num_rows']}. Resume with the same files, or start a new run from the exported hf/ folder."
            )
        self._cursor = self._cursor.restored(state)


def plan_rows(
    samples: Sequence[Sample], size: int, dp: int, config: TrainConfig, hidden_size: int
) -> list[MiniBatch]:
    """Return the rows of a step, in their order, as mini-batches of `size`."""
    longest = config.batch.max_tokens_per_micro_batch
    return plan_mini_batches(samples, size, {}, dp, longest, hidden_size, seed=None)

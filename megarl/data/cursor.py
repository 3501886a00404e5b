"""Which rows come next: an endless, resumable walk over a dataset."""

from __future__ import annotations

import random
from typing import Any


class DataCursor:
    """Pass after pass over `num_rows` rows; no row is skipped or repeated within a pass, and none dropped at its end.

    Every pass has its own order, drawn from (seed, pass) alone, so a state of five numbers restores the walk exactly.
    """

    def __init__(self, num_rows: int, seed: int = 0, shuffle: bool = True):
        if num_rows < 1:
            raise ValueError(f"num_rows ({num_rows}) must be at least 1: the dataset is empty.")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._pass, self._offset = 0, 0
        self._order = self._order_of_pass()

    def next_rows(self, n: int) -> list[int]:
        """The next `n` row indices. They may span passes, so `n` may exceed `num_rows`."""
        if n < 0:
            raise ValueError(f"n ({n}) must not be negative.")
        rows: list[int] = []
        while len(rows) < n:
            if self._offset == self.num_rows:
                self._pass, self._offset = self._pass + 1, 0
                self._order = self._order_of_pass()
            taken = self._order[self._offset : self._offset + n - len(rows)]
            self._offset += len(taken)
            rows += taken
        return rows

    def state(self) -> dict[str, Any]:
        """JSON-able; see `restore`."""
        return {
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "pass": self._pass,
            "offset": self._offset,
        }

    @classmethod
    def restore(cls, state: dict[str, Any], num_rows: int | None = None) -> DataCursor:
        """A cursor that goes on where `state()` was taken.

        Args:
            num_rows: size of the dataset as it is now.
        Raises: ValueError if the dataset has changed its size: the order would be another one.
        """
        if num_rows is not None and num_rows != state["num_rows"]:
            raise ValueError(
                f"the training data has {num_rows} rows, but the checkpoint was made with {state['num_rows']}: "
                "resume with the same --train-data, or start a new run from the exported hf/ folder."
            )
        cursor = cls(state["num_rows"], state["seed"], state["shuffle"])
        cursor._pass, cursor._offset = state["pass"], state["offset"]
        cursor._order = cursor._order_of_pass()
        return cursor

    def _order_of_pass(self) -> list[int]:
        order = list(range(self.num_rows))
        if self.shuffle:
            # Seeded by text: unlike a hash of a tuple or NumPy's generators, this stream is the same in every Python version.
            random.Random(f"{self.seed}/{self._pass}").shuffle(order)
        return order

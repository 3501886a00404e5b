"""Decide which rows come next: an endless, resumable walk over a dataset.

cursor = DataCursor(num_rows=3, shuffle=False)
cursor.next_visits(4)        {0: 0, 1: 1, 2: 2, 3: 0}      visit -> row; row 0 is visited twice
cursor.visit([2, 2])         {4: 2, 5: 2}                  rows of the caller's choice
cursor.next_visits(1)        {6: 1}                        the walk continues where it was"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any


class DataCursor:
    """Gives the next rows of a dataset with `num_rows` rows, pass after pass. Its state can be saved and
    restored.

    Within a pass no row is skipped or repeated, and no row is dropped at its end. Every pass has a separate
    order, drawn from (seed, pass) alone, so a state of six numbers restores the walk.

    A visit is one use of a row by the run. Visits are counted from 0 and no number is used again. Names made
    from a visit are therefore unique in the run, even if a batch holds a row twice.
    """

    def __init__(self, num_rows: int, seed: int | str = 0, shuffle: bool = True):
        if num_rows < 1:
            raise ValueError(f"num_rows ({num_rows}) must be at least 1: the dataset is empty.")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._pass, self._offset, self._num_visits = 0, 0, 0
        self._order = self._order_of_pass()

    def next_rows(self, n: int) -> list[int]:
        """Return the next `n` row indices. They may span passes, so `n` may exceed `num_rows`."""
        if n < 0:
            raise ValueError(f"n ({n}) must not be negative.")
        rows: list[int] = []
        while len(rows) < n:
            if self._offset == len(self._order):
                self._pass, self._offset = self._pass + 1, 0
                self._order = self._order_of_pass()
            taken = self._order[self._offset : self._offset + n - len(rows)]
            self._offset += len(taken)
            rows += taken
        return rows

    def next_visits(self, n: int) -> dict[int, int]:
        """Take the next `n` rows. Returns visit -> row, in order."""
        return self.visit(self.next_rows(n))

    def visit(self, rows: Sequence[int]) -> dict[int, int]:
        """Number one use of each of these rows, without moving the position in the data set. Returns visit ->
        row, in order."""
        first = self._num_visits
        self._num_visits += len(rows)
        return dict(enumerate(rows, first))

    def state(self) -> dict[str, Any]:
        """Return the position as values that JSON can hold, for `restored`."""
        return {
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "pass": self._pass,
            "offset": self._offset,
            "visits": self._num_visits,
        }

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Continue where `state()` was taken of a cursor with the same rows and the same seed."""
        self._pass, self._offset = state["pass"], state["offset"]
        self._order = self._order_of_pass()
        # Old checkpoints have no count of visits: then each row of the walk is one visit.
        self._num_visits = state.get("visits", state["pass"] * state["num_rows"] + state["offset"])

    def restored(self, state: Mapping[str, Any]) -> DataCursor:
        """Return a cursor of this data set that continues where `state()` was taken.

        Raises: ValueError if the size of the data set has changed, or if the state is that of files with
            weights."""
        if "mixture" in state:
            raise ValueError(
                "the checkpoint was made with --train-data-weights "
                f"{' '.join(map(str, state['mixture']['weights']))}. Resume with weights, or start a new run from "
                "the exported hf/ folder."
            )
        if "measured" in state:
            raise ValueError(
                "the checkpoint was made with --curriculum or with limits of --difficulty-min and --difficulty-max. "
                "Resume with one of them, or start a new run from the exported hf/ folder."
            )
        if state["num_rows"] != self.num_rows:  # the order would differ
            raise ValueError(
                f"the training data has {self.num_rows} rows, but the checkpoint was made with "
                f"{state['num_rows']}: resume with the same --train-data, or start a new run from the exported "
                "hf/ folder."
            )
        cursor = DataCursor(self.num_rows, state["seed"], state["shuffle"])
        cursor.go_to(state)
        return cursor

    def _order_of_pass(self) -> list[int]:
        order = list(range(self.num_rows))
        if self.shuffle:
            # Seeded by text: unlike a hash of a tuple or NumPy's generators, this stream is the same in every
            # Python version.
            random.Random(f"{self.seed}/{self._pass}").shuffle(order)
        return order

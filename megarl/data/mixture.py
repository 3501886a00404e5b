"""Decide which rows come next from several files with weights: a walk over each file, interleaved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.cursor import DataCursor


class MixtureCursor(DataCursor):
    """Gives the next rows of a data set of several files, in proportion to the files' weights. Its state can
    be saved and restored.

    Each file is walked by itself, pass after pass: within a pass no row of it is skipped or repeated. The
    next row is one of the file that lags most behind its share. So of any first rows, each of two files gives
    its share to less than one row, and each of k files to less than k - 1.

    Example: MixtureCursor((100, 10), (3, 1), shuffle=False).next_rows(8)    [0, 1, 100, 2, 3, 4, 101, 5]

    Args:
        sizes: rows of each file; the rows of the data set are those of the files, one after another.
        weights: weight of each file, above 0.
    Raises: ValueError for a file without rows."""

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int = 0, shuffle: bool = True
    ) -> None:
        if empty := [number for number, size in enumerate(sizes, 1) if not size]:
            raise ValueError(
                f"--train-data-weights: file {empty[0]} of --train-data has no rows. Leave it and its weight out."
            )
        super().__init__(sum(sizes), seed, shuffle=False)  # its own order is not used
        self.shuffle, self.sizes, self.weights = shuffle, tuple(sizes), tuple(weights)
        self._files = [DataCursor(size, f"{seed}/file {k}", shuffle) for k, size in enumerate(sizes)]
        self._first = [sum(sizes[:k]) for k in range(len(sizes))]
        self._taken = [0] * len(sizes)
        """Rows that each file has given by these weights."""

    def next_rows(self, n: int) -> list[int]:
        """Return the next `n` row indices."""
        if n < 0:
            raise ValueError(f"n ({n}) must not be negative.")
        rows, total = [], sum(self.weights)
        for _ in range(n):
            count = sum(self._taken) + 1
            lag = [w / total * count - taken for w, taken in zip(self.weights, self._taken, strict=True)]
            file = lag.index(max(lag))
            self._taken[file] += 1
            rows.append(self._first[file] + self._files[file].next_rows(1)[0])
        return rows

    def state(self) -> dict[str, Any]:
        """Return the position as values that JSON can hold, for `restored`."""
        mixture = {
            "sizes": [*self.sizes],
            "weights": [*self.weights],
            "taken": [*self._taken],
            "files": [file.state() for file in self._files],
        }
        return super().state() | {"mixture": mixture}

    def restored(self, state: Mapping[str, Any]) -> MixtureCursor:
        """Return a cursor of these files that continues where `state()` was taken. If the weights have
        changed, the proportions are counted anew from here, while the passes over the files continue.

        Raises: ValueError if the size of a file has changed, or if the state is that of one data set."""
        mixture = state.get("mixture")
        if mixture is None or mixture["sizes"] != [*self.sizes]:
            had = f"files of {mixture['sizes']} rows" if mixture else "no --train-data-weights"
            raise ValueError(
                f"--train-data-weights: the files have {[*self.sizes]} rows, and the checkpoint was made with {had}. "
                "Resume with the same files and with weights as then, or start a new run from the exported hf/ folder."
            )
        cursor = MixtureCursor(self.sizes, self.weights, state["seed"], state["shuffle"])
        cursor._num_visits = state["visits"]
        for file, saved in zip(cursor._files, mixture["files"], strict=True):
            file.go_to(saved)
        if tuple(mixture["weights"]) == self.weights:
            cursor._taken = [*mixture["taken"]]
        return cursor

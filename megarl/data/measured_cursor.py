"""Decide which rows come next by the rewards that their last responses got: a curriculum and a difficulty
filter.

cursor = MeasuredCursor(4, 0, False, order="easy-first", low=0.0, high=0.9, rest=1)
cursor.next_rows(4)                                    [0, 1, 2, 3]      nothing is measured in the first pass
for row, rate in enumerate([0.5, 1.0, 0.0, 0.75]):
    cursor.measure(row, rate)
cursor.next_rows(2)                                    [3, 0]            1 is too easy and 2 too hard
cursor.next_rows(4)                                    [1, 3, 0, 2]      both have rested for a pass"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.data.cursor import DataCursor


class MeasuredCursor(DataCursor):
    """Walks over a data set pass after pass, as `DataCursor`. At the beginning of a pass it looks at the
    rates, which are the mean rewards of each row's last visit.

    A row whose rate is at most `low`, or at least `high`, rests for `rest` passes, and is then visited and
    measured again. All other rows are in every pass once, also those without a rate. If every row rests, none
    does. So a row is visited at least once in `rest` + 1 passes.

    Args:
        order: of the rows of a pass: shuffled, or by their rates, the highest or the lowest first. Equal
            rates keep the order of `shuffle`; rows without a rate come last.
        low, high: None is no limit."""

    def __init__(
        self,
        num_rows: int,
        seed: int | str = 0,
        shuffle: bool = True,
        *,
        order: str = "shuffled",
        low: float | None = None,
        high: float | None = None,
        rest: int = 1,
    ) -> None:
        self.order, self.low, self.high, self.rest = order, low, high, rest
        self._rates: dict[int, float] = {}
        self._rested: dict[int, int] = {}
        """Rows that rest -> passes that they are left out of, with this one."""
        super().__init__(num_rows, seed, shuffle)

    def measure(self, row: int, rate: float) -> None:
        """Note the mean reward of a visit of a row."""
        self._rates[row] = rate

    @property
    def num_resting(self) -> int:
        """Number of rows that this pass leaves out."""
        return len(self._rested)

    @property
    def num_measured(self) -> int:
        """Number of rows that have a rate."""
        return len(self._rates)

    def _is_outside(self, row: int) -> bool:
        rate = self._rates.get(row)
        if rate is None:
            return False
        return (self.low is not None and rate <= self.low) or (self.high is not None and rate >= self.high)

    def _order_of_pass(self) -> list[int]:
        """Return the rows of the pass that begins, and let the others rest."""
        order = super()._order_of_pass()
        outside = [row for row in order if self._is_outside(row) and self._rested.get(row, 0) < self.rest]
        self._rested = (
            {} if len(outside) == len(order) else {row: self._rested.get(row, 0) + 1 for row in outside}
        )
        order = [row for row in order if row not in self._rested]
        if self.order == "shuffled":
            return order
        sign = -1.0 if self.order == "easy-first" else 1.0
        unknown = float("inf")
        return sorted(order, key=lambda row: sign * self._rates[row] if row in self._rates else unknown)

    def state(self) -> dict[str, Any]:
        """Return the position and the rates as values that JSON can hold, for `restored`."""
        measured = {
            "left": self._order[self._offset :],
            "rates": [[*self._rates], [*self._rates.values()]],
            "rested": [[*self._rested], [*self._rested.values()]],
        }
        return super().state() | {"measured": measured}

    def restored(self, state: Mapping[str, Any]) -> MeasuredCursor:
        """Return a cursor of this data set and these limits that continues where `state()` was taken. The
        pass goes on as it was begun; other limits hold from the next pass.

        Raises: ValueError if the size of the data set has changed, or if the state is that of files with
            weights."""
        plain = super().restored({key: value for key, value in state.items() if key != "measured"})
        cursor = MeasuredCursor(
            self.num_rows,
            plain.seed,
            plain.shuffle,
            order=self.order,
            low=self.low,
            high=self.high,
            rest=self.rest,
        )
        cursor.go_to(state)
        return cursor

    def go_to(self, state: Mapping[str, Any]) -> None:
        measured = state.get("measured")
        if measured is None:  # of a run without a curriculum, whose pass goes on
            super().go_to(state)
            return
        self._pass, self._num_visits = state["pass"], state["visits"]
        self._order, self._offset = [*measured["left"]], 0
        self._rates = dict(zip(*measured["rates"], strict=True))
        self._rested = dict(zip(*measured["rested"], strict=True))

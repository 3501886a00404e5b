"""Record when each node of a flow ran, and where. Opens in chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from megarl.files.writing import writing

_MAX_RECORDS = 50_000  # about 10 MB; a longer run keeps the newest


@dataclass(frozen=True, slots=True)
class Record:
    """One call, or the exchange that brings columns to a call.

    Times are `time.time()`. The times of a call are those of its ranks' clocks."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the call; empty for a function of the driver."""
    label: str | None
    """The executor's label when the call was issued: "step 3"."""
    issued: float
    seconds: float
    """Seconds of the slowest rank."""
    ended: float

    @property
    def started(self) -> float:
        """Start on the slowest rank; other ranks may have begun earlier."""
        return max(self.issued, self.ended - self.seconds)


class Timeline:
    """Records of calls, in the order in which the driver saw them end."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque(maxlen=_MAX_RECORDS)

    def chrome_trace(self) -> dict[str, object]:
        """Return the trace: a line per rank and one for the driver, in microseconds since the first call."""
        start = min((r.issued for r in self.records), default=0.0)
        ranks = sorted({rank for r in self.records for rank in r.ranks})
        lines = [(rank, f"rank {rank}") for rank in ranks] + [(len(ranks) and ranks[-1] + 1, "driver")]
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
            for tid, name in lines
        ]
        for r in self.records:
            for tid in r.ranks or (lines[-1][0],):
                events.append(
                    {
                        "ph": "X",
                        "name": r.name,
                        "pid": 0,
                        "tid": tid,
                        "ts": (r.started - start) * 1e6,
                        "dur": (r.ended - r.started) * 1e6,
                        "args": {"label": r.label, "queued_s": r.started - r.issued},
                    }
                )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, path: Path) -> None:
        with writing(path):
            path.write_text(json.dumps(self.chrome_trace()))

"""Record when each call of a flow ran and on which ranks, as a file for chrome://tracing or
ui.perfetto.dev."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from megarl.files.writing import writing

_MAX_RECORDS = 50_000  # about 10 MB; a longer run keeps the newest


@dataclass(frozen=True, slots=True)
class Record:
    """Ranks and times of one call of a flow, or of the exchange that brings columns to a call.

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
    """The newest 50,000 calls of a job with their ranks and times, in the order in which the driver saw them
    end."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque(maxlen=_MAX_RECORDS)

    def chrome_trace(self) -> dict[str, object]:
        """Return Chrome's trace-event JSON as a dict: a line per rank and one for the driver, in microseconds
        since the first call."""
        records = list(self.records)  # another thread may add some meanwhile
        start = min((r.issued for r in records), default=0.0)
        ranks = sorted({rank for r in records for rank in r.ranks})
        lines = [(rank, f"rank {rank}") for rank in ranks] + [(len(ranks) and ranks[-1] + 1, "driver")]
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
            for tid, name in lines
        ]
        for r in records:
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
        """Write the trace as JSON. The file is replaced at once, so that a reader never sees half of it."""
        new = path.with_name(f".{path.name}.{threading.get_ident()}.partial")
        try:
            with writing(path):
                new.write_text(json.dumps(self.chrome_trace()))
                os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

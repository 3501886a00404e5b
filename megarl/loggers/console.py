"""Show the progress of a run: a live display on a terminal, else one line per step, `name=value`, easy to
grep.

step=3/20 reward=0.512 loss=-0.0036 length=21.4 tokens/s=3210 s/step=0.43 left=0:07
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from megarl.role_names import kind_and_suffix, with_suffix

COLUMNS = {
    "reward": ("reward/mean", "{:.3f}"),
    "failed": ("reward/failed", "{:.0f}"),
    "loss": ("policy/loss", "{:.4f}"),
    "eval": ("eval/reward", "{:.3f}"),
    "length": ("response/length_mean", "{:.1f}"),
    "tokens/s": ("throughput/tokens_per_s", "{:.0f}"),
    "s/step": ("time/step_s", "{:.2f}"),
}
ONLY_IF_ANY = {"failed"}
"""Columns that are left out where they are 0."""
_RECENT_STEPS = 20


class Progress:
    """Shows the steps of one run on `stream` (default: stdout), as a live display if `terminal` is true, else
    as lines. Default of `terminal`: whether the stream is one. There is a line for the first step, every
    `interval` steps, and the last."""

    def __init__(
        self,
        num_steps: int,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        interval: int = 1,
    ):
        self._num_steps, self._stream = num_steps, sys.stdout if stream is None else stream
        self._interval = interval
        self._latest: dict[str, str] = {}
        self._ends: deque[float] = deque(maxlen=_RECENT_STEPS + 1)
        self._step = 0
        is_terminal = self._stream.isatty() if terminal is None else terminal
        self._live = _LiveDisplay(num_steps, self._stream) if is_terminal else None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        self._step = step
        self._ends.append(time.perf_counter())
        now, left = _columns(metrics), {"left": self.time_left()}
        self._latest = {name: value for name, value in self._latest.items() if not _is_rare(name)} | now
        if self._live is not None:
            self._live.update(step, self._latest | left)
        elif step % self._interval == 0 or step == self._num_steps or len(self._ends) == 1:
            values = " ".join(f"{name}={value}" for name, value in (now | left).items())
            self._line(f"step={step}/{self._num_steps} {values}")

    def show_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        self._latest |= _columns(scores)
        if self._live is not None:
            self._live.update(self._step, dict(self._latest))
        else:
            self._line(
                f"eval step={step}/{self._num_steps} "
                + " ".join(
                    f"{name}={value:.0f}" if name.endswith("/failed") else f"{name}={value:.3f}"
                    for name, value in scores.items()
                )
            )

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        if self._live is not None:
            self._live.note(text)
        else:
            self._line(text)

    def time_left(self) -> str:
        """Return the remaining time as h:mm:ss, by the mean of the recent steps with the evaluations and
        exports between them; "?" before there are two."""
        if len(self._ends) < 2:
            return "?"
        per_step = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return clock(per_step * (self._num_steps - self._step))

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def _line(self, text: str) -> None:
        with contextlib.suppress(OSError):  # whoever read it has ended, and training need not
            self._stream.write(text + "\n")
            self._stream.flush()


def _is_rare(column: str) -> bool:
    return kind_and_suffix(column)[0] in ONLY_IF_ANY


def clock(seconds: float) -> str:
    """Format seconds as 0:07, 12:34 or 1:02:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _columns(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return column -> formatted value of the metrics to show. Those of the second actor are reward_2 and so
    on."""
    shown = {}
    for name, (key, form) in COLUMNS.items():
        group = key.split("/")[0]
        actors = map(kind_and_suffix, {metric.split("/")[0] for metric in metrics})
        for suffix in sorted(suffix for kind, suffix in actors if kind == group):
            of_actor = with_suffix(key, suffix)
            if of_actor in metrics and (metrics[of_actor] or name not in ONLY_IF_ANY):
                shown[f"{name}{suffix}"] = form.format(metrics[of_actor])
    return shown


class _LiveDisplay:
    """A bar and, below it, the latest values, redrawn in place by rich."""

    def __init__(self, num_steps: int, stream: TextIO):
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            expand=True,
        )
        self._task = self._bar.add_task("step", total=num_steps)
        self._values = Text("starting", overflow="fold")
        self._live = Live(
            Group(self._bar, self._values),
            console=Console(file=stream, force_terminal=True),
            refresh_per_second=2,
        )
        self._live.start()

    def update(self, step: int, values: Mapping[str, str]) -> None:
        self._bar.update(self._task, completed=step)
        self._values.plain = "   ".join(f"{name} {value}" for name, value in values.items())

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

"""Draw the curves of one or several runs into a PNG or SVG file, a panel per metric.

    megarl plot runs/a                                    reward, accuracy, KL, entropy, length, gradient norm
    megarl plot runs/a runs/b --out both.png              two runs, overlaid
    megarl plot runs/a --metrics policy/lr 'mismatch/*'   others, by the names of docs/metrics.md

A run that was resumed is one curve, also if it went on in another folder. The run may still be going. The
full path of the picture is printed, with "(replaced)" if there was such a file before."""

from __future__ import annotations

import fnmatch
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.errors import ConfigError, did_you_mean
from megarl.inspect.arguments import Parser
from megarl.inspect.curves import INK, draw, new_figure
from megarl.inspect.runs import metrics_of, run_folder
from megarl.role_names import kind_and_suffix, with_suffix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEFAULT_PANELS = (
    ("reward/mean",),
    ("eval/reward", "eval/reward_greedy"),
    ("policy/ref_kl", "kl/per_response", "policy/kl"),
    ("policy/entropy",),
    ("response/length_mean",),
    ("policy/grad_norm",),
)
"""Metrics of the panels. Of the KLs only the first that a run has is drawn: that to the reference, if any."""
WITHOUT_REWARD = ("policy/loss",)
"""First panel of runs that have no rewards."""
KL_PANEL = DEFAULT_PANELS[2]
SUFFIXES = (".png", ".svg")
_MAX_COLUMNS = 3
_LINES = ("-", "--", ":", "-.")
_FEW_POINTS = 40
"""Up to so many points a curve has markers."""


@dataclass(frozen=True)
class Run:
    """The name of a run in the plot, and the rows of its metrics."""

    name: str
    rows: list[dict]

    @property
    def metrics(self) -> dict[str, None]:
        """Names of all metrics, in the order of their first row."""
        names = {name: None for row in self.rows for name in row}
        return {name: None for name in names if name not in ("step", "nonfinite")}


def main(argv: Sequence[str]) -> int:
    parser = Parser("plot", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder")
    parser.add_argument(
        "--out", metavar="FILE", default="curves.png", help="*.png or *.svg; default: curves.png"
    )
    parser.add_argument(
        "--metrics", metavar="NAME", nargs="+", help="metrics, a panel each; patterns such as 'time/*' too"
    )
    arguments = parser.parse(argv)
    path = _picture(arguments.out)
    runs = _read(arguments.runs)
    panels = _default_panels(runs) if arguments.metrics is None else _asked_panels(runs, arguments.metrics)
    replaced = " (replaced)" if path.exists() else ""
    plot(runs, panels, path)
    for run in runs:
        sys.stdout.writelines(f"{line}\n" for line in _gaps(run, panels))
    sys.stdout.write(f"{path.absolute()}{replaced}\n")
    return 0


def plot(runs: Sequence[Run], panels: Sequence[Sequence[str]], path: Path) -> None:
    """Draw the metrics of each panel for all runs. Raises: ConfigError if the file cannot be written."""
    columns = min(_MAX_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    try:
        with new_figure(path, rows, columns, 4.2 * columns, 2.8 * rows + 0.3) as figure:
            for axes, panel in zip(figure.axes, panels):
                axes.set(title=panel[0], xlabel="step")
                for number, run in enumerate(runs):
                    _draw_run(axes, run, panel, f"C{number % 10}")
            for axes in figure.axes[len(panels) :]:
                axes.remove()
            handles = [
                figure.axes[0].plot([], [], f"C{n % 10}", label=run.name)[0] for n, run in enumerate(runs)
            ]
            if len(runs) > 1:
                figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(runs)))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            [f"--out ({path}): cannot be written: {reason}. Name a file in a folder that exists."]
        ) from error


def _draw_run(axes: Axes, run: Run, panel: Sequence[str], color: str) -> None:
    """Draw the metrics of a panel for one run: one color, a line style per metric and actor."""
    keys = [key for name in panel for key in _of_all_actors(run, name)]
    for key, line in zip(keys, itertools.cycle(_LINES)):
        points = sum(key in row for row in run.rows)
        draw(axes, run.rows, key, line, color=color, marker="o" if points <= _FEW_POINTS else None)
    if len(keys) > 1 and axes.get_legend() is None:
        lines = [axes.plot([], [], line, color=INK, label=key)[0] for key, line in zip(keys, _LINES)]
        axes.legend(handles=lines)


def _of_all_actors(run: Run, name: str) -> Iterator[str]:
    """Yield a metric's names in a run: reward/mean, and reward_2/mean of the second actor."""
    group = name.partition("/")[0]
    groups = {metric.partition("/")[0] for metric in run.metrics}
    own = [suffix for kind, suffix in map(kind_and_suffix, groups) if kind == group]
    for key in (with_suffix(name, suffix) for suffix in sorted({"", *own})):
        if key in run.metrics:
            yield key


def _default_panels(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    def there(name: str) -> bool:
        return any(True for run in runs for _ in _of_all_actors(run, name))

    panels = DEFAULT_PANELS if there("reward/mean") else (WITHOUT_REWARD, *DEFAULT_PANELS)
    found = []
    for panel in panels:
        names = tuple(name for name in panel if there(name))
        found += [names[:1] if panel == KL_PANEL else names] if names else []
    if found:
        return found
    names = ", ".join(runs[0].metrics)
    raise ConfigError(
        [f"RUN ({runs[0].name}): has none of the default metrics. Choose --metrics of {names}."]
    )


def _asked_panels(runs: Sequence[Run], patterns: Sequence[str]) -> list[tuple[str, ...]]:
    names = {name: None for run in runs for name in run.metrics}
    found: dict[str, None] = {}
    errors = []
    for pattern in patterns:
        fitting = fnmatch.filter(names, pattern)
        found |= dict.fromkeys(fitting)
        if not fitting:
            advice = did_you_mean(pattern, names, prefix="") or f" There are {', '.join(names)}."
            errors.append(f"--metrics ({pattern}): no run has such a metric.{advice}")
    if errors:
        raise ConfigError(errors)
    return [(name,) for name in found]


def _gaps(run: Run, panels: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line per drawn metric that was not finite somewhere, and one if first steps are missing."""
    begin = min((row["step"] for row in run.rows if row["step"] > 0), default=1)
    if begin > 1:
        yield f"{run.name}: begins at step {begin}, as the run that its --load names is not at that path"
    for name in [key for panel in panels for name in panel for key in _of_all_actors(run, name)]:
        lost = [row for row in run.rows if name in row.get("nonfinite", {})]
        if lost:
            value, first = lost[0]["nonfinite"][name], lost[0]["step"]
            yield f"{run.name}: {name} is not finite in {len(lost)} steps, first {value} in step {first}"


def _read(names: Sequence[str]) -> list[Run]:
    folders = [run_folder(name) for name in names]
    ends = [folder.resolve().name for folder in folders]
    runs = []
    for folder, end in zip(folders, ends, strict=True):
        rows = metrics_of(folder)
        if not rows:
            raise ConfigError(
                [f"RUN ({folder}): metrics.jsonl has no complete row yet. Try again when a step has ended."]
            )
        runs.append(Run(end if ends.count(end) == 1 else str(folder), rows))
    return runs


def _picture(name: str) -> Path:
    path = Path(name)
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            [f"--out ({name}): must end in {' or '.join(SUFFIXES)}. Try {path.with_suffix('.png')}."]
        )
    return path

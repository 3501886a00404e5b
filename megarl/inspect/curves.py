"""Draw metrics over the steps with matplotlib, in one style for light and dark pages.

An SVG has no background, and the color of its text follows the reader's light or dark theme."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#57606a"
THEME = f"<style>:root{{--ink:{INK}}}@media(prefers-color-scheme:dark){{:root{{--ink:#adbac7}}}}</style>"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megarl",  # equal rows give an equal file
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextlib.contextmanager
def new_figure(path: Path, num_rows: int, num_columns: int, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure with a grid of axes, and write it into a PNG or SVG file if the body succeeds.

    Args:
        width, height: inches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, _ = plt.subplots(num_rows, num_columns, figsize=(width, height), constrained_layout=True)
        try:
            yield figure
            if path.suffix == ".svg":
                figure.savefig(path, transparent=True, metadata={"Date": None})
                _follow_theme(path)
            else:
                figure.savefig(path, dpi=120)
        finally:
            plt.close(figure)


def draw(axes: Axes, rows: Sequence[Mapping[str, object]], key: str, style: str, **options: object) -> None:
    """Draw one metric over the steps of the rows that have it. A value that is not finite is a gap."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    values = [float("nan") if value is None else value for _, value in points]
    axes.plot([step for step, _ in points], values, style, markersize=4, **options)


def _follow_theme(path: Path) -> None:
    """Make the color of an SVG's text and lines follow the reader's theme."""
    text = "\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n"
    end_of_opening_tag = text.index(">", text.index("<svg")) + 1
    head, body = text[:end_of_opening_tag], text[end_of_opening_tag:]
    path.write_text(f"{head}\n {THEME}{body.replace(INK, 'var(--ink)')}")

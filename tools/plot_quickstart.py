"""Plot the reward, held-out accuracy and response length of a GRPO run over its steps.

    python tools/plot_quickstart.py runs/quickstart/grpo runs/quickstart/curves.png
    python tools/plot_quickstart.py runs/quickstart/grpo docs/quickstart_curve.svg

An SVG has no background, and the color of its text follows the reader's light or dark theme."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run folder, which holds metrics.jsonl")
    parser.add_argument("file", type=Path, help="the picture: *.png or *.svg")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
    plot(rows, arguments.file)


def plot(rows: list[dict], path: Path) -> None:
    """Plot the rows of metrics.jsonl into a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trained = [row for row in rows if "reward/mean" in row]
    evaluated = [row for row in rows if "eval/accuracy" in row]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True)
        draw(left, trained, "reward/mean", "-", color="#2f81f7", label="reward, training prompts")
        draw(left, evaluated, "eval/accuracy", "o-", color="#db6d28", label="held-out accuracy, sampled")
        draw(
            left, evaluated, "eval/accuracy_greedy", "s--", color="#2da44e", label="held-out accuracy, greedy"
        )
        left.set(xlabel="GRPO step", ylim=(0, 1.02))
        left.legend(loc="lower right")
        draw(right, trained, "response/length_mean", "-", color="#8957e5")
        right.set(xlabel="GRPO step", ylabel="response length, tokens", ylim=(0, None))
        if path.suffix == ".svg":
            figure.savefig(path, transparent=True, metadata={"Date": None})
            follow_theme(path)
        else:
            figure.savefig(path, dpi=120)
        plt.close(figure)


def draw(axes, rows: list[dict], key: str, style: str, **options) -> None:
    """Plot one metric over the steps."""
    axes.plot([row["step"] for row in rows], [row[key] for row in rows], style, markersize=4, **options)


def follow_theme(path: Path) -> None:
    """Make the color of an SVG's text and lines follow the reader's theme."""
    text = "\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n"
    end_of_opening_tag = text.index(">", text.index("<svg")) + 1
    head, body = text[:end_of_opening_tag], text[end_of_opening_tag:]
    path.write_text(f"{head}\n {THEME}{body.replace(INK, 'var(--ink)')}")


if __name__ == "__main__":
    main()

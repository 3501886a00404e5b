"""Plot the reward, held-out accuracy and response length of a GRPO run over its steps. Of a run over several
turns there are the answers per episode too.

    python tools/plot_quickstart.py runs/quickstart/grpo runs/quickstart/curves.png
    python tools/plot_quickstart.py runs/quickstart/grpo docs/quickstart_curve.svg

An SVG has no background, and the color of its text follows the reader's light or dark theme."""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.inspect.curves import draw, new_figure
from megarl.inspect.runs import metrics_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run folder, which holds metrics.jsonl")
    parser.add_argument("file", type=Path, help="the picture: *.png or *.svg")
    arguments = parser.parse_args()
    plot(metrics_of(arguments.run), arguments.file)


def plot(rows: list[dict], path: Path) -> None:
    """Plot the rows of metrics.jsonl into a file."""
    with new_figure(path, 1, 2, 10, 3.4) as figure:
        left, right = figure.axes
        draw(left, rows, "reward/mean", "-", color="#2f81f7", label="reward, training prompts")
        draw(left, rows, "eval/reward", "o-", color="#db6d28", label="held-out accuracy, sampled")
        draw(left, rows, "eval/reward_greedy", "s--", color="#2da44e", label="held-out accuracy, greedy")
        left.set(xlabel="GRPO step", ylim=(0, 1.02))
        left.legend(loc="lower right")
        draw(right, rows, "response/length_mean", "-", color="#8957e5")
        right.set(xlabel="GRPO step", ylabel="response length, tokens", ylim=(0, None))
        if any("turns/mean" in row for row in rows):
            right.lines[0].set_label("sampled tokens per episode")
            draw(right, rows, "turns/mean", "--", color="#bf8700", label="answers per episode")
            right.set(ylabel="")
            right.legend(loc="center right")


if __name__ == "__main__":
    main()

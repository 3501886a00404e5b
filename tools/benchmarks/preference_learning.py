"""Train the quickstart's warm-up model on pairs with every algorithm that learns from them, and print the accuracy on
held-out sums as a table.

    python tools/benchmarks/preference_learning.py --quickstart runs/quickstart --out runs/preference

The folder of the quickstart needs its data and sft_mixed/hf. A run that is complete is not repeated, so the script
can be stopped at any time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from sums.files import write_labelled

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "quickstart_dpo.args"
METHODS = {
    "dpo": "--algorithm dpo",
    "dpo+nll": "--algorithm dpo --nll-coef 1",
    "ipo": "--algorithm ipo",
    "simpo": "--algorithm simpo",
    "orpo": "--algorithm orpo",
    "rpo": "--algorithm rpo",
    "kto": "--algorithm kto --global-batch-size 64",
}
"""Name in the table -> flags in place of the recipe's algorithm."""
_LABELLED = ("kto",)
"""Methods that learn from single answers, which are both answers of every pair."""
_OURS = ("--algorithm", "--model", "--train-data", "--save", "--nproc-per-node")
"""Flags of the recipe that this script gives itself."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quickstart", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("runs/preference"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    before = accuracy(
        arguments.quickstart / "sft_mixed" / "hf", arguments.quickstart, arguments.out / "warm-up.json"
    )
    print("| method | held-out accuracy | gain | rewards/margins of the last step |\n|-|-|-|-|", flush=True)
    print(f"| warm-up | {before:.3f} | | |", flush=True)
    for name in arguments.methods:
        run = arguments.out / f"{name}_{arguments.seed}"
        metrics = train(run, METHODS[name], arguments.quickstart, arguments.seed)
        after = accuracy(run / "hf", arguments.quickstart, run.with_suffix(".json"))
        margin = metrics["rewards/margins"]
        print(f"| {name} | {after:.3f} | {after - before:+.3f} | {margin:.2f} |", flush=True)
    return 0


def train(run: Path, flags: str, quickstart: Path, seed: int) -> dict[str, float]:
    """Train one model, unless it is there. Returns the metrics of the last step."""
    if not (run / "hf" / "config.json").is_file():
        kept = [
            line
            for line in RECIPE.read_text().splitlines()
            if line.startswith("--") and not line.startswith(_OURS)
        ]
        words = [*" ".join(kept).split(), *flags.split(), "--seed", str(seed), "--nproc-per-node", "1"]
        data = quickstart / "data" / "pairs.jsonl"
        if run.name.startswith(_LABELLED):
            data = write_labelled(data, run.parent / "labelled.jsonl")
            at = words.index("--global-batch-size")
            del words[at : at + 2]  # the recipe's, which counts pairs
        model = quickstart / "sft_mixed" / "hf"
        megarl("train", *words, "--model", model, "--train-data", data, "--save", run)
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def accuracy(model: Path, quickstart: Path, file: Path) -> float:
    """Return the accuracy of the model's greedy answers to the held-out sums, which `file` keeps."""
    if not file.is_file():
        lengths = ("--max-prompt-length", "32", "--max-response-length", "48")
        data = quickstart / "data" / "test.jsonl"
        found = megarl("eval", "--model", model, "--eval-data", data, *lengths, "--json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found)
    return json.loads(file.read_text())["all"]["reward_greedy"]["value"]


def megarl(*words: object, seconds: float | None = None) -> str:
    """Run a command of megarl, and return what it prints to stdout.

    Raises: subprocess.SubprocessError if it fails, or takes longer than `seconds`."""
    command = [sys.executable, "-m", "megarl.cli", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=seconds).stdout


if __name__ == "__main__":
    sys.exit(main())

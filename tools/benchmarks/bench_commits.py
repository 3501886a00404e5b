"""Compare step time, CPU seconds, start-up and memory of the quickstart's GRPO between checkouts of megarl, which take
turns.

    python tools/benchmarks/bench_commits.py OLD NEW --checkpoint runs/quickstart/sft_mixed/hf
           --data runs/quickstart/data --out runs/compared --json out.json [--steps 20] [--repeats 3]

OLD and NEW are checkouts with an environment each in .venv. The same checkout twice with --flags compares flags.
Ratios are those of the same repeat, because other load on the machine changes from one repeat to the next."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))  # missing under PYTHONSAFEPATH
import measured_process

SKIPPED_STEPS = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", type=Path, help="the first one is what others are divided by")
    parser.add_argument("--checkpoint", type=Path, required=True, help="Hugging Face folder to start from")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="folder for all runs, made anew")
    parser.add_argument("--json", type=Path, required=True, help="where to write the result")
    parser.add_argument(
        "--flags",
        default="",
        help='training flags that all checkouts but the first get besides, as one word: --flags="--executor ray"',
    )
    arguments = parser.parse_args()
    if arguments.steps <= SKIPPED_STEPS:
        parser.error(f"--steps ({arguments.steps}): the first {SKIPPED_STEPS} are left out. Try 20.")
    for checkout in arguments.checkouts:
        if not (checkout / ".venv" / "bin" / "python").exists():
            parser.error(f"{checkout}: has no .venv. Run tools/setup_env.py in it.")
    for file in ("train.jsonl", "test.jsonl"):
        if not (arguments.data / file).is_file():
            parser.error(f"--data ({arguments.data}): has no {file}. Try runs/quickstart/data.")
    if arguments.out.exists():
        parser.error(f"--out ({arguments.out}): exists already. Name a new folder.")
    arguments.out.mkdir(parents=True)
    repeats = [
        [
            train(checkout, arguments, f"{index}_{repeat}", shlex.split(arguments.flags) if index else [])
            for index, checkout in enumerate(arguments.checkouts)
        ]
        for repeat in range(arguments.repeats)
    ]
    arguments.json.write_text(json.dumps({"command": sys.argv, "repeats": repeats}, indent=1) + "\n")
    for index, checkout in enumerate(arguments.checkouts):
        print(f"{checkout}: {', '.join(summary(repeats, index, name) for name in repeats[0][0])}")
    return 0


def train(
    checkout: Path, arguments: argparse.Namespace, name: str, more_flags: Sequence[str]
) -> dict[str, float]:
    """Run one job of a checkout.

    Returns: its median seconds per step, CPU seconds per step of all processes, seconds of start-up, peak bytes."""
    folder = arguments.out / name
    files = [
        "--model",
        arguments.checkpoint,
        "--train-data",
        arguments.data / "train.jsonl",
        "--save",
        folder,
    ]
    flags = [*files, "--eval-data", arguments.data / "test.jsonl", "--eval-interval", 0]
    command = [checkout / ".venv" / "bin" / "python", "-P", "-m", "megarl.cli", "train"]
    recipe = f"@{checkout.resolve()}/configs/quickstart_grpo.args"
    words = [*command, recipe, *flags, "--train-iters", arguments.steps, "--nproc-per-node", 2, *more_flags]
    env = {variable: value for variable, value in os.environ.items() if variable != "OMP_NUM_THREADS"}
    measured = measured_process.run([*map(str, words)], folder.with_suffix(".log"), env, is_step)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["time/step_s"] for row in rows if "time/step_s" in row]
    first = next(at for at, line in measured.lines if is_step(line))
    (_, cpu_before), *_, (_, cpu_after) = measured.cpu_seconds[SKIPPED_STEPS - 1 :]
    return {
        "step_s": median(steps[SKIPPED_STEPS:]),
        "cpu_s_per_step": (cpu_after - cpu_before) / (len(measured.cpu_seconds) - SKIPPED_STEPS),
        "startup_s": first - steps[0] - measured.started_at,
        "peak_memory_bytes": measured.peak_memory_bytes,
    }


def is_step(line: str) -> bool:
    """Return whether a line is the one that a job prints after a step."""
    return re.match(r"step=\d+/", line) is not None


def summary(repeats: list[list[dict[str, float]]], index: int, name: str) -> str:
    ratios = [repeat[index][name] / repeat[0][name] for repeat in repeats]
    value = median(repeat[index][name] for repeat in repeats)
    return f"{name} {value:.4g} ({median(ratios):.3f} of the first; {min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    sys.exit(main())

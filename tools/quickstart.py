"""Run the quickstart (`make quickstart`): make data, fine-tune, train with GRPO, and show the results.

    python tools/quickstart.py [--seed 0] [--out runs/quickstart] [--small] [flags of megarl train for GRPO]

The results are a table, an answer before and after training, and a plot. Two cores are enough, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from sums.files import make_sums

STAGES = ("sft", "sft_mixed", "grpo")
SMALL = {
    "sft": ["--train-iters", "3"],
    "sft_mixed": ["--train-iters", "3"],
    "grpo": ["--train-iters", "2", "--eval-interval", "1", "--eval-num-prompts", "8"],
}
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PLOT = Path(__file__).resolve().parent / "plot_quickstart.py"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/quickstart"), help="replaced if it holds an earlier quickstart"
    )
    parser.add_argument(
        "--small", action="store_true", help="a few steps of every stage, to see that all runs"
    )
    arguments, grpo_flags = parser.parse_known_args()
    start_over(arguments.out)
    seconds = {}
    started = time.time()
    make_sums(arguments.out / "data", arguments.seed)
    seconds["data"] = time.time() - started
    for stage, flags in zip(STAGES, stage_flags(arguments.out, arguments.seed, grpo_flags), strict=True):
        flags += SMALL[stage] if arguments.small else []
        print(f"\n== {stage}: megarl train @configs/quickstart_{stage}.args {' '.join(flags)}", flush=True)
        started = time.time()
        code = subprocess.call(
            [sys.executable, "-m", "megarl.cli", "train", f"@{CONFIGS}/quickstart_{stage}.args", *flags]
        )
        if code:
            return code
        seconds[stage] = time.time() - started
    report(arguments.out, seconds)
    return 0


def start_over(out: Path) -> None:
    """Remove the folders of an earlier quickstart, and nothing else."""
    if out.exists() and any(out.iterdir()):
        if not (out / "data" / "model" / "config.json").exists():
            raise SystemExit(f"--out ({out}) exists and is not an earlier quickstart: name another folder")
        shutil.rmtree(out)


def stage_flags(out: Path, seed: int, grpo_flags: list[str]) -> list[list[str]]:
    """Return the flags that differ from the recipe of a stage: paths and the seed."""
    data, common = out / "data", ["--seed", str(seed)]
    return [
        [
            *common,
            "--model",
            f"{data}/model",
            "--train-data",
            f"{data}/sft_worked.jsonl",
            "--save",
            f"{out}/sft",
        ],
        [
            *common,
            "--model",
            f"{out}/sft/hf",
            "--train-data",
            f"{data}/sft_mixed.jsonl",
            "--save",
            f"{out}/sft_mixed",
        ],
        [
            *common,
            "--model",
            f"{out}/sft_mixed/hf",
            "--train-data",
            f"{data}/train.jsonl",
            "--eval-data",
            f"{data}/test.jsonl",
            "--save",
            f"{out}/grpo",
            *grpo_flags,
        ],
    ]


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def report(out: Path, seconds: dict[str, float]) -> None:
    rows = read_metrics(out / "grpo")
    evaluated = [r for r in rows if "eval/reward" in r]
    first, last = evaluated[0], evaluated[-1]
    steps = [r for r in rows if "time/step_s" in r]
    phases = {
        name: sum(r[f"time/{name}_s"] for r in steps) / len(steps)
        for name in ("rollout", "reward", "log_probs", "update", "reshard", "step")
    }
    print("\n                              before   after")
    for name, key in (
        ("held-out accuracy, T=1", "eval/reward"),
        ("held-out accuracy, greedy", "eval/reward_greedy"),
    ):
        print(f"{name:28s}  {first[key]:6.3f}  {last[key]:6.3f}")
    print(
        f"{'response length':28s}  {steps[0]['response/length_mean']:6.1f}  "
        f"{steps[-1]['response/length_mean']:6.1f}"
    )
    print(
        f"tokens/s {sum(r['throughput/tokens_per_s'] for r in steps) / len(steps):.0f}, peak memory "
        f"{max(r['memory/peak_bytes'] for r in steps) / 2**30:.2f} GiB over all ranks"
    )
    print("seconds per step: " + ", ".join(f"{n} {s:.3f}" for n, s in phases.items()))
    print("seconds in all: " + ", ".join(f"{n} {s:.0f}" for n, s in seconds.items()))
    answers = [
        json.loads(line) for line in (out / "grpo" / "rollouts" / "eval.jsonl").read_text().splitlines()
    ]
    greedy = [a for a in answers if a["name"] == "eval/reward_greedy"]
    for when, answer in (("before", greedy[0]), ("after", greedy[-1])):
        print(f"\n{when}: {answer['prompt'][-1]['content']}\n  " + answer["response"].replace("\n", "\n  "))
    plot = [sys.executable, str(PLOT), str(out / "grpo"), str(out / "curves.png")]
    subprocess.run(plot, check=True)
    print(f"\ncurves: {out / 'curves.png'}   trained model: {out / 'grpo' / 'hf'}")


if __name__ == "__main__":
    sys.exit(main())

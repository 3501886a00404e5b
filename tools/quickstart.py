"""Run a quickstart: make data, fine-tune, train with GRPO, and show the results.

    python tools/quickstart.py           sums in one turn (`make quickstart`)
    python tools/quickstart.py --agent   sums with a calculator, in several turns (`make quickstart-agent`)

The results are a table, an answer before and after training, and a plot. Two cores are enough, without a GPU.
Flags that are not listed below go to `megarl train` for GRPO."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from calculator_env import make_calculator
from sums.files import make_sums

STAGES = ("sft", "sft_mixed", "grpo")
SMALL = {
    "sft": ["--train-iters", "3"],
    "sft_mixed": ["--train-iters", "3"],
    "grpo": ["--train-iters", "2", "--eval-interval", "1", "--eval-num-prompts", "8"],
}
CURVES = "curves.png"
PLOT = Path(__file__).resolve().parent / "plot_quickstart.py"


@dataclass(frozen=True)
class Task:
    """What a quickstart trains on."""

    out: Path
    """Default of --out."""
    recipes: str
    """Path to the recipes of the stages, with {} for the stage."""
    make: Callable[[Path, int], None]
    """Writes data and model into a folder, given the seed."""
    warmup: str
    """Data file of the first stage."""
    grpo_flags: tuple[str, ...] = ()
    """Paths of the recipe of GRPO that must not depend on the current folder."""


SUMS = Task(Path("runs/quickstart"), f"{ROOT}/configs/quickstart_{{}}.args", make_sums, "sft_worked.jsonl")
CALCULATOR = Task(
    Path("runs/calculator"),
    f"{ROOT}/configs/calculator_{{}}.args",
    make_calculator,
    "sft_tool.jsonl",
    ("--env", f"{ROOT}/examples/calculator_env.py:Calculator"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agent", action="store_true", help="several turns with a calculator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        help="if it holds an earlier quickstart, its data, sft, sft_mixed and grpo are replaced; default: "
        "runs/quickstart, with --agent runs/calculator",
    )
    parser.add_argument(
        "--small", action="store_true", help="a few steps of every stage, to see that all runs"
    )
    arguments, grpo_flags = parser.parse_known_args()
    task = CALCULATOR if arguments.agent else SUMS
    out = arguments.out or task.out
    start_over(out)
    seconds = {}
    started = time.time()
    task.make(out / "data", arguments.seed)
    seconds["data"] = time.time() - started
    for stage, flags in zip(STAGES, stage_flags(task, out, arguments.seed, grpo_flags), strict=True):
        flags += SMALL[stage] if arguments.small else []
        recipe = task.recipes.format(stage)
        print(f"\n== {stage}: megarl train @configs/{Path(recipe).name} {' '.join(flags)}", flush=True)
        started = time.time()
        code = subprocess.call([sys.executable, "-m", "megarl.cli", "train", f"@{recipe}", *flags])
        if code:
            return code
        seconds[stage] = time.time() - started
    report(out, seconds)
    return 0


def start_over(out: Path) -> None:
    """Remove what an earlier quickstart has made in its folder, and no other run there."""
    if not out.exists() or not any(out.iterdir()):
        return
    if not (out / "data" / "model" / "config.json").exists():
        raise SystemExit(f"--out ({out}) exists and is not an earlier quickstart: name another folder")
    (out / CURVES).unlink(missing_ok=True)
    for name in (*STAGES, "data"):  # by `data` the folder is known again if this is interrupted
        if (out / name).exists():
            shutil.rmtree(out / name)


def stage_flags(task: Task, out: Path, seed: int, grpo_flags: list[str]) -> list[list[str]]:
    """Return the flags that differ from the recipe of a stage: paths and the seed."""
    data, common = out / "data", ["--seed", str(seed)]
    return [
        [
            *common,
            "--model",
            f"{data}/model",
            "--train-data",
            f"{data}/{task.warmup}",
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
            *task.grpo_flags,
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
    for name, key in (("response length", "response/length_mean"), ("answers per episode", "turns/mean")):
        if key in steps[0]:
            print(f"{name:28s}  {steps[0][key]:6.1f}  {steps[-1][key]:6.1f}")
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
        print(f"\n{when}: {answer['prompt'][-1]['content']}\n  " + text_of(answer).replace("\n", "\n  "))
    plot = [sys.executable, str(PLOT), str(out / "grpo"), str(out / CURVES)]
    subprocess.run(plot, check=True)
    print(f"\ncurves: {out / CURVES}   trained model: {out / 'grpo' / 'hf'}")


def text_of(answer: dict) -> str:
    """Return the text of a logged response; of an episode a line per message, with its role."""
    if "turns" not in answer:
        return answer["response"]
    return "\n".join(f"{turn['role']:10s} {turn['content']}" for turn in answer["turns"])


if __name__ == "__main__":
    sys.exit(main())

"""Measure the distance of healthy jobs from the limits of the log-prob gate, for docs/reliability.md.

    python tools/soak_gate.py --quickstart runs/quickstart --out runs/soak [--steps 2000] [--recipes lora
    experts] [--write-table]

Every recipe is a job whose gate accepts everything. Its metrics are then compared with the default limits. An
interrupted recipe continues from its last checkpoint, and a completed one is not run again. On two cores,
2000 steps of a recipe take about 20 minutes. --write-table replaces the table in docs/reliability.md."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megarl.algorithms import REGISTRY
from megarl.gate_limits import GateLimits
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.trainer.gate import gate_error

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- tools/soak_gate.py begin -->", "<!-- tools/soak_gate.py end -->"
RECIPES = {
    "grpo-lr-1e-4": ("--lr", "1e-4"),
    "grpo-lr-1e-3": ("--lr", "1e-3"),
    "long-answers": (
        "--lr",
        "1e-3",
        "--max-response-length",
        "192",
        "--num-prompts",
        "2",
        "--global-batch-size",
        "16",
        "--reward-function",
        f"{Path(__file__).resolve()}:long_answer",
    ),
    "tensor-parallel": (
        "--nproc-per-node",
        "2",
        "--tensor-model-parallel-size",
        "2",
        "--rollout-tensor-parallel-size",
        "2",
        "--lr",
        "1e-3",
    ),
    "lora": ("--lora-rank", "8", "--lr", "1e-3"),
    "experts": ("--lr", "3e-4"),
    "bf16": ("--bf16", "--lr", "1e-3"),
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def long_answer(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Reward long answers without repetitions, so that responses fill --max-response-length and the policy's
    entropy stays high."""
    return len({solution_str[i : i + 3] for i in range(len(solution_str))}) / 192


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quickstart", type=Path, default=Path("runs/quickstart"), help="what tools/quickstart.py wrote"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument(
        "--write-table", action="store_true", help="into docs/reliability.md, of all recipes that have begun"
    )
    arguments, flags = parser.parse_known_args()
    for recipe in arguments.recipes:
        if code := run(recipe, arguments.quickstart, arguments.out, arguments.steps, flags):
            return code
    rows = [
        Headroom.read(recipe, arguments.out / recipe)
        for recipe in RECIPES
        if (arguments.out / recipe / "metrics.jsonl").exists()
    ]
    table = "\n".join((*HEAD, *map(str, rows)))
    print(table)
    if arguments.write_table:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        DOCUMENT.write_text(f"{before}\n{table}\n{after}", encoding="utf-8")
    return int(any(row.false_alarms for row in rows))


def run(recipe: str, quickstart: Path, out: Path, steps: int, flags: list[str]) -> int:
    """Run a recipe up to a number of steps, from its last checkpoint if it has one.

    Returns the exit code of the job."""
    folder = out / recipe
    if len(read_steps(folder)) >= steps:
        return 0
    model = quickstart / "sft_mixed" / "hf"
    if recipe == "experts":
        model = out / "experts-sft-mixed" / "hf"
        if not model.exists() and (code := fine_tune_experts(quickstart, out)):
            return code
    return train(
        "grpo",
        "--model",
        model,
        "--train-data",
        quickstart / "data" / "train.jsonl",
        "--eval-data",
        quickstart / "data" / "test.jsonl",
        "--eval-interval",
        0,
        "--num-rollouts-to-log",
        0,
        "--nproc-per-node",
        1,
        "--gate-max-abs",
        "inf",
        "--gate-mean-abs",
        "inf",
        "--warn-after-zero-reward-steps",
        0,
        "--save",
        folder,
        "--load",
        folder,
        "--save-interval",
        100,
        "--train-iters",
        steps,
        *RECIPES[recipe],
        *flags,
    )


def fine_tune_experts(quickstart: Path, out: Path) -> int:
    """Run the quickstart's two stages of fine-tuning with a mixture of experts.

    Returns the exit code of the first job that fails, or 0."""
    model = out / "experts-model"
    model.mkdir(parents=True, exist_ok=True)
    for file in (quickstart / "data" / "model").iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | EXPERTS))
    data = quickstart / "data"
    return train(
        "sft",
        "--model",
        model,
        "--random-init",
        "--nproc-per-node",
        1,
        "--train-data",
        data / "sft_worked.jsonl",
        "--save",
        out / "experts-sft",
    ) or train(
        "sft_mixed",
        "--model",
        out / "experts-sft" / "hf",
        "--nproc-per-node",
        1,
        "--train-data",
        data / "sft_mixed.jsonl",
        "--save",
        out / "experts-sft-mixed",
    )


def train(stage: str, *flags: object) -> int:
    """Run a job of the quickstart's recipe `stage` with other flags. The last of two equal flags wins."""
    merged: dict[str, list[str]] = {}
    for word in map(str, flags):
        if word.startswith("--"):
            name = word
            merged[name] = []
        else:
            merged[name].append(word)
    words = [word for name, values in merged.items() for word in (name, *values)]
    return subprocess.call(
        [sys.executable, "-m", "megarl.cli", "train", f"@{ROOT}/configs/quickstart_{stage}.args", *words]
    )


def read_steps(folder: Path) -> list[dict[str, float]]:
    """Return the last row of each step in a run folder, [] without rows."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({row["step"]: row for row in rows if "mismatch/max_abs" in row}.values())


HEAD = (
    "| recipe | steps | tokens | mean, of its limit | outliers in a step | accepted | largest "
    "difference, of its limit | steps above 1e-4 " + "| false alarms |",
    "|---|---|---|---|---|---|---|---|---|",
)
"""Head of the table. Means, outliers and differences are those of the worst step."""


@dataclass(frozen=True)
class Headroom:
    """The distance of a healthy job from the default limits."""

    recipe: str
    rows: list[dict[str, float]]
    limits: GateLimits

    @classmethod
    def read(cls, recipe: str, folder: Path) -> Headroom:
        """Compare the metrics in a run folder with the default limits of its configuration."""
        config = load_config(
            [f"@{folder / 'resolved.args'}", "--gate-max-abs", "none", "--gate-mean-abs", "none"], REGISTRY
        )
        return cls(recipe, read_steps(folder), GateLimits.of(config, ModelShape.load(config.model.model)))

    @property
    def false_alarms(self) -> int:
        """Return the number of steps at which the default limits would have ended the job."""
        return sum(gate_error(row, self.limits) is not None for row in self.rows)

    def __str__(self) -> str:
        """Return the recipe's row of the table."""
        accepted = [self.limits.accepted(row) for row in self.rows]

        def worst(name: str) -> tuple[float, float]:
            """Return the value nearest to its limit, and the limit."""
            return max(
                (
                    (row[f"mismatch/{name}"], limits[name])
                    for row, limits in zip(self.rows, accepted, strict=True)
                ),
                key=lambda pair: (pair[0] / pair[1], pair[0]),
            )

        (mean, mean_limit), (outliers, outliers_limit), (largest, largest_limit) = map(
            worst, ("clipped_abs", "outliers", "max_abs")
        )
        cells = (
            self.recipe,
            len(self.rows),
            f"{sum(row['mismatch/tokens'] for row in self.rows):,.0f}",
            f"{mean:.2g}, {mean / mean_limit:.1%}",
            f"{outliers:.0f}",
            f"{outliers_limit:.1f}",
            f"{largest:.2g}, {largest / largest_limit:.1%}",
            sum(row["mismatch/max_abs"] > 1e-4 for row in self.rows),
            self.false_alarms,
        )
        return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())

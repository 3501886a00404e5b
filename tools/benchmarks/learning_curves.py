"""Train the quickstart's warm-up model with every method of `megarl algorithms` that samples, and show what each learns.

    python tools/benchmarks/learning_curves.py --quickstart runs/quickstart --out runs/curves
    python tools/benchmarks/learning_curves.py --only grpo,rloo --seeds 0

The control of a method is the same run with rewards of chance (permuted_reward.py): permuted within each
group, or, for an algorithm that does not compare the samples of a group, drawn for each response. A finished
run is kept in cells/ of the folder, so the script can be stopped at any time and goes on when it is started
again. After each run it writes table.md and curves.svg. The folder of the quickstart needs its data and
sft_mixed/hf, and grpo/hf for the methods with a teacher. Methods that learn from pairs are in
preference_learning.py."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from permuted_reward import FOLDER, GROUP
from preference_learning import megarl

from megarl.algorithms import REGISTRY
from megarl.algorithms.listing import RECIPES
from megarl.algorithms.ratio_transforms import TRANSFORMS
from megarl.inspect.curves import draw, new_figure
from megarl.inspect.runs import metrics_of

RECIPE = HERE.parents[1] / "configs" / "quickstart_grpo.args"
ONE_UPDATE = "--global-batch-size 128"
_METRICS = ("eval/reward", "eval/reward_greedy")
_SHOWN = "eval/reward_greedy"
_TEACHER = "grpo/hf"
_COLORS = ("#2f81f7", "#db6d28", "#2da44e", "#8957e5")


class Method(NamedTuple):
    name: str
    flags: str
    """As the table shows them. {quickstart} stands for the folder of the quickstart."""
    has_control: bool = True
    """Whether there is a control. Methods that have another teacher than the reward have none."""

    @property
    def key(self) -> str:
        """The name in files and in --only."""
        return re.sub(r"[^a-z0-9+]+", "-", self.name.lower()).strip("-")


class Cell(NamedTuple):
    """One run: a method, or its control, with one seed."""

    method: Method
    seed: int
    is_control: bool

    @property
    def name(self) -> str:
        return f"{self.method.key}{'_control' if self.is_control else ''}_{self.seed}"


COMPOSITIONS = [
    Method("SFT mixed in", "--sft-data {quickstart}/data/sft_worked.jsonl --sft-coef 0.1", False),
    Method("curriculum", "--difficulty-min 0 --difficulty-max 1 --curriculum easy-first"),
    Method("log-probs of the engine", "--old-log-probs engine"),
    Method("distill", f"--algorithm distill --reference-model {{quickstart}}/{_TEACHER}", False),
    Method("gkd", f"--algorithm gkd --reference-model {{quickstart}}/{_TEACHER}", False),
]


def methods() -> list[Method]:
    """Return the papers of `megarl algorithms`, the algorithms with their defaults, the ratio transforms that no
    paper has, and what else an algorithm learns from: right answers, a teacher, an order of the rows."""
    alone = [
        recipe for recipe in RECIPES if "--share-episodes" not in recipe.flags
    ]  # the task has one policy
    found = [Method(recipe.name, recipe.flags) for recipe in alone]
    found += [Method(f"{name}, defaults", f"--algorithm {name}") for name in REGISTRY]
    papers = " ".join(method.flags for method in found).split()
    found += [
        Method(f"grpo, {loss}", f"--algorithm grpo --policy-loss {loss}")
        for loss in TRANSFORMS
        if loss not in papers and loss != "ppo"
    ]
    kinds = {name: cls() for name, cls in REGISTRY.items()}
    trained = {
        name
        for name, kind in kinds.items()
        if kind.needs_rollout and not kind.is_taught and not kind.needs_cost_critic
    }
    found = [Method(m.name, fitted(m.flags)) for m in found if algorithm_of(m.flags) in trained]
    return found + COMPOSITIONS


def algorithm_of(flags: str) -> str:
    words = flags.split()
    return words[words.index("--algorithm") + 1] if "--algorithm" in words else "grpo"


def fitted(flags: str) -> str:
    """Return a paper's flags with what the quickstart needs beside them: shorter answers, a shorter warm-up
    of the critic and its learning rate, one update per step."""
    flags = flags.replace("--overlong-buffer 4096", "--overlong-buffer 16")
    flags = flags.replace("--critic-warmup-iters 50", "--critic-warmup-iters 5")
    algorithm = REGISTRY[algorithm_of(flags)]
    if algorithm.needs_critic:
        flags += " --critic-lr 1e-3"
    is_pairwise = getattr(algorithm, "one_update", False)
    if is_pairwise or algorithm.is_on_policy or "--policy-loss reinforce" in flags:
        flags += f" {ONE_UPDATE}"
    return flags


def main(argv: list[str] | None = None) -> int:
    every = {method.key: method for method in methods()}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quickstart", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("runs/curves"))
    parser.add_argument("--only", default=",".join(every), help="methods to run, of %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--without-controls", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=120, help="a run that takes longer is not counted")
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in every]:
        parser.error(f"--only ({','.join(unknown)}): must be of {','.join(every)}")
    if not (arguments.quickstart / "sft_mixed" / "hf" / "config.json").is_file():
        parser.error(
            f"--quickstart ({arguments.quickstart}): holds no sft_mixed/hf. Run `make quickstart`, or "
            "name the folder of one."
        )
    cells = [
        Cell(every[name], seed, is_control)
        for seed in arguments.seeds
        for name in names
        for is_control in (False, True)
        if not is_control or (every[name].has_control and not arguments.without_controls)
    ]
    for cell in cells:
        if cell.name not in finished(arguments.out):
            try:
                run(cell, arguments.quickstart, arguments.out, arguments.timeout_s)
            except subprocess.SubprocessError as error:
                print(f"{cell.name}: {error}", file=sys.stderr, flush=True)
        show(list(every.values()), arguments.seeds, arguments.out)
    print((arguments.out / "table.md").read_text())
    return int(any(cell.name not in finished(arguments.out) for cell in cells))


def run(cell: Cell, quickstart: Path, out: Path, seconds: float) -> None:
    """Train one cell, and keep its held-out accuracies in a file."""
    folder, rewards = out / "runs" / cell.name, out / "rewards" / cell.name
    for stale in (folder, rewards):
        shutil.rmtree(stale, ignore_errors=True)
    flags = shlex.split(cell.method.flags.format(quickstart=quickstart))
    words: list[object] = [f"@{RECIPE}", *flags, "--seed", cell.seed]
    data = quickstart / "data"
    words += ["--model", quickstart / "sft_mixed" / "hf", "--train-data", data / "train.jsonl"]
    words += ["--eval-data", data / "test.jsonl", "--save", folder, "--nproc-per-node", 1]
    if cell.is_control:
        os.environ[FOLDER] = str(rewards.resolve())
        algorithm = REGISTRY[algorithm_of(cell.method.flags)]
        chance = "permuted" if algorithm.relative_to_group and not algorithm.greedy_samples else "coin"
        words += ["--reward-function", f"{HERE}/permuted_reward.py:{chance}", "--reward-num-workers", GROUP]
    started = time.monotonic()
    megarl("train", *words, seconds=seconds)
    rows = [{name: row[name] for name in ("step", *_METRICS)} for row in metrics_of(folder) if _SHOWN in row]
    file = out / "cells" / f"{cell.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".new")
    unfinished.write_text(json.dumps({"seconds": round(time.monotonic() - started, 1), "rows": rows}) + "\n")
    unfinished.replace(file)
    for used in (folder, rewards):  # a model for each cell would fill a disk
        shutil.rmtree(used, ignore_errors=True)


def finished(out: Path) -> dict[str, list[dict]]:
    """Return the accuracies of each cell that is finished, by its name."""
    return {
        file.stem: json.loads(file.read_text())["rows"] for file in sorted((out / "cells").glob("*.json"))
    }


def show(every: Sequence[Method], seeds: Sequence[int], out: Path) -> None:
    """Write the table and the picture of what is finished."""
    done = finished(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table(every, seeds, done))
    if done:
        plot(every, seeds, done, out / "curves.svg")


def table(every: Iterable[Method], seeds: Sequence[int], done: dict[str, list[dict]]) -> str:
    """Return a row per method in Markdown: greedy held-out accuracy before and after with each seed, and
    means over the seeds that are finished of its gain, of its control's, and of its control's by sampled
    answers."""
    of_seeds = (f"seed {seed}: before, after" for seed in seeds)
    head = ["method", "flags", *of_seeds, "gain", "control's gain", "sampled"]
    lines = [f"| {' | '.join(head)} |", "|-" * len(head) + "|"]
    for method in every:
        ends = []
        for seed in seeds:
            rows = done.get(Cell(method, seed, is_control=False).name)
            ends.append(f"{rows[0][_SHOWN]:.3f}, {rows[-1][_SHOWN]:.3f}" if rows else "not run")
        gains = [gain(method, seeds, done, is_control=False), "none", "none"]
        if method.has_control:
            gains[1:] = [
                gain(method, seeds, done, is_control=True, metric=one) for one in (_SHOWN, _METRICS[0])
            ]
        lines.append(f"| {' | '.join([method.name, f'`{method.flags}`', *ends, *gains])} |")
    return "\n".join(lines) + "\n"


def gain(
    method: Method,
    seeds: Sequence[int],
    done: dict[str, list[dict]],
    is_control: bool,
    metric: str = _SHOWN,
) -> str:
    found = [done[name] for seed in seeds if (name := Cell(method, seed, is_control).name) in done]
    if not found:
        return "not run"
    mean = sum(rows[-1][metric] - rows[0][metric] for rows in found) / len(found)
    return f"{mean:+.3f}" + ("" if len(found) == len(seeds) else f" ({len(found)} of {len(seeds)} seeds)")


def plot(every: Sequence[Method], seeds: Sequence[int], done: dict[str, list[dict]], path: Path) -> None:
    """Plot greedy held-out accuracy over the steps, a picture per method with its control dashed."""
    names = {m: [Cell(m, seed, c).name for seed in seeds for c in (False, True)] for m in every}
    shown = [method for method in every if any(name in done for name in names[method])]
    columns = min(4, len(shown))
    if not shown:
        return
    num_rows = -(-len(shown) // columns)
    with new_figure(path, num_rows, columns, max(4, 2.8 * columns), 2.4 * num_rows) as figure:
        for axes, method in zip(figure.axes, shown):
            for i, name in enumerate(names[method]):
                kind, color = ("control, " if i % 2 else ""), _COLORS[i // 2 % len(_COLORS)]
                if name in done:
                    label = f"{kind}seed {seeds[i // 2]}"
                    draw(axes, done[name], _SHOWN, "s--" if i % 2 else "o-", color=color, label=label)
            axes.set(title=method.name, xlabel="step", ylim=(0, 1.02))
            axes.legend(loc="upper left", fontsize=7)
        for axes in figure.axes[len(shown) :]:
            axes.set_axis_off()


if __name__ == "__main__":
    sys.exit(main())

"""Compare asynchronous rollouts with synchronous training: the quickstart's GRPO on two ranks, in turns.

    python tools/benchmarks/bench_async.py --json out.json --out runs/async [--old ../old] [--only colocated]
           [--recipes quickstart,tail] [--repeats 3] [--steps 20] [--checkpoint HF_FOLDER --data FOLDER]

A turn runs every contender once: the synchronous trainer of the checkout --old, if given, then --staleness 0,
and then 1, 2 and 4 with --weight-update recompute and keep. In the recipe `tail` one answer in ten ignores its
end and has --max-response-length tokens; async_plants/sitecustomize.py arranges that. Ratios are those of the
same turn, because other load on the machine changes from one turn to the next. Without --checkpoint the
quickstart's warm-up makes one.

The first 6 and the last 4 of the --steps are not measured: the engines begin with the prompts of several steps,
and in the last steps they have fewer than usual."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parent))  # missing under PYTHONSAFEPATH
import bench_e2e
import measured_process

ROOT = Path(__file__).resolve().parents[2]
PLANTS = Path(__file__).resolve().parent / "async_plants"
SKIPPED_STEPS, MOST_STALE = 2, 4
PLACEMENTS = {
    "colocated": [],
    "colocated-processes": ["--rollout-engine", "out-of-process"],
    "disjoint": ["--actor-ranks", "0", "--rollout-ranks", "1"],
}
RECIPES = {"quickstart": [], "tail": ["--max-response-length", "256"]}
LONG_ANSWERS = {"quickstart": None, "tail": "0.1"}
SETTINGS = [("0", None), *itertools.product("124", ("recompute", "keep"))]


@dataclass(frozen=True)
class Contender:
    """One way to train: a checkout, a placement of the roles, and the flags of asynchronous rollouts."""

    recipe: str
    placement: str
    setting: str
    checkout: Path
    flags: tuple[str, ...]


@dataclass
class Run:
    """What was measured in one run, without its first steps."""

    samples_per_s: float
    step_s: float
    """Mean seconds of a step."""
    cpu_s: float
    """CPU seconds of all processes per step."""
    idle: float
    """Fraction of the ranks' time in which they neither run a call nor step an engine."""
    staleness: float | None
    """Mean age of the tokens, in versions."""
    mixed: float | None
    """Fraction of the samples that several versions have sampled."""
    length: float
    """Mean response length."""
    load: float
    """Load average of the machine before the run."""


def main() -> int:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True)
    if arguments.checkpoint is None:
        arguments.checkpoint, arguments.data = bench_e2e.warm_up(arguments.out / "quickstart", seed=0)
    contenders = list_contenders(arguments)
    runs: list[dict] = []
    for turn in range(arguments.repeats):
        for contender in contenders:
            run = train(contender, turn, arguments)
            name = {"recipe": contender.recipe, "placement": contender.placement}
            runs.append({"turn": turn, **name, "setting": contender.setting, **asdict(run)})
            print(json.dumps(runs[-1]), flush=True)
            arguments.json.write_text(json.dumps({"command": sys.argv, "runs": runs}, indent=1) + "\n")
    print(table(runs))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path, help="checkout of an older commit, with its environment in .venv")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder to start from")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl; needed with --checkpoint")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of these, separated by commas")
    parser.add_argument("--only", default=",".join(PLACEMENTS), help="of these placements")
    parser.add_argument(
        "--settings",
        default=",".join(setting_name(*setting) for setting in SETTINGS),
        help="of these settings",
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="folder for all runs, made anew")
    parser.add_argument("--json", type=Path, required=True, help="where to write the result")
    parser.add_argument("flags", nargs="*", help="further flags of megarl train, after --")
    arguments = parser.parse_args()
    if (arguments.checkpoint is None) != (arguments.data is None):
        parser.error("--checkpoint and --data go together: give both or neither.")
    left_out = SKIPPED_STEPS + 2 * MOST_STALE
    if arguments.steps <= left_out:
        parser.error(f"--steps ({arguments.steps}): {left_out} are not measured. Try 30.")
    if arguments.old and not (arguments.old / ".venv" / "bin" / "python").exists():
        parser.error(f"--old ({arguments.old}): has no .venv. Run tools/setup_env.py in it.")
    known = {"recipes": RECIPES, "only": PLACEMENTS, "settings": {setting_name(*one) for one in SETTINGS}}
    for flag, names in known.items():
        values = getattr(arguments, flag).split(",")
        if unknown := sorted({*values} - {*names}):
            parser.error(f"--{flag} ({unknown[0]}): must be some of {','.join(names)}.")
        setattr(arguments, flag, values)
    return arguments


def setting_name(staleness: str, update: str | None) -> str:
    return f"S={staleness}-{update}" if update else f"S={staleness}"


def list_contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Return the contenders of a turn, in their order."""
    contenders = []
    for recipe, placement in itertools.product(arguments.recipes, arguments.only):
        if arguments.old:
            contenders.append(Contender(recipe, placement, "old", arguments.old, ()))
        for staleness, update in SETTINGS:
            name = setting_name(staleness, update)
            flags = ("--staleness", staleness, "--weight-update", update) if update else ()
            if name in arguments.settings:
                contenders.append(Contender(recipe, placement, name, ROOT, flags))
    return contenders


def train(contender: Contender, turn: int, arguments: argparse.Namespace) -> Run:
    """Run one job, and return what was measured after its first steps."""
    name = f"{contender.recipe}_{contender.placement}_{contender.setting}_{turn}"
    folder, busy, load = arguments.out / name, arguments.out / f"{name}.busy", os.getloadavg()[0]
    busy.mkdir()
    python = [contender.checkout / ".venv" / "bin" / "python", "-P", "-m", "megarl.cli", "train"]
    recipe = [f"@{contender.checkout.resolve()}/configs/quickstart_grpo.args", "--nproc-per-node", 2]
    data = ["--train-data", arguments.data / "train.jsonl", "--eval-data", arguments.data / "test.jsonl"]
    files = ["--model", arguments.checkpoint, *data, "--save", folder]
    flags = ["--eval-interval", 0, "--train-iters", arguments.steps, *RECIPES[contender.recipe]]
    words = [*python, *recipe, *files, *flags, *PLACEMENTS[contender.placement], *contender.flags]
    env = {variable: value for variable, value in os.environ.items() if variable != "OMP_NUM_THREADS"}
    env |= {"PYTHONPATH": str(PLANTS), "BUSY": str(busy)}
    if (share := LONG_ANSWERS[contender.recipe]) is not None:
        env["LONG_ANSWERS"] = share
    window = SKIPPED_STEPS + MOST_STALE, arguments.steps - MOST_STALE
    first, last = (f"step={step}/" for step in window)
    measured = measured_process.run(
        [*map(str, words), *arguments.flags],
        folder.with_suffix(".log"),
        env,
        note_cpu=lambda line: line.startswith((first, last)),
    )
    (start, cpu_start), (end, cpu_end) = measured.cpu_seconds
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if window[0] < row["step"] <= window[1] and "time/step_s" in row]
    lines = (folder / "resolved.args").read_text()
    sizes = [
        int(re.search(rf"--{flag} (\d+)", lines)[1]) for flag in ("num-prompts", "num-samples-per-prompt")
    ]
    return Run(
        samples_per_s=len(rows) * sizes[0] * sizes[1] / (end - start),
        step_s=(end - start) / len(rows),
        cpu_s=(cpu_end - cpu_start) / len(rows),
        idle=1 - mean(busy_share(path, start, end) for path in busy.iterdir()),
        staleness=mean_of(rows, "staleness/mean"),
        mixed=mean_of(rows, "staleness/mixed"),
        length=mean_of(rows, "response/length_mean"),
        load=load,
    )


def busy_share(path: Path, start: float, end: float) -> float:
    """Return the fraction of the time from `start` to `end` that a rank's intervals cover. They do not
    overlap."""
    intervals = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
    return sum(max(0.0, min(to, end) - max(begin, start)) for begin, to in intervals) / (end - start)


def mean_of(rows: list[dict], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return mean(values) if values else None


def table(runs: list[dict]) -> str:
    """Return one line per contender: its speed as a ratio to the first contender of its recipe and placement
    in the same turn, and medians over the turns."""
    lines = [
        "| recipe | placement | setting | speed | lowest to highest | CPU s | idle | mean age | mixed | length |",
        "|-|-|-|-|-|-|-|-|-|-|",
    ]
    by_place: dict[tuple, dict[str, list[dict]]] = {}
    for run in runs:
        by_place.setdefault((run["recipe"], run["placement"]), {}).setdefault(run["setting"], []).append(run)
    for place, by_setting in by_place.items():
        reference = next(iter(by_setting.values()))
        for setting, own in by_setting.items():
            pairs = list(zip(own, reference, strict=False))
            speed = [run["samples_per_s"] / other["samples_per_s"] for run, other in pairs]
            cpu = median(run["cpu_s"] / other["cpu_s"] for run, other in pairs)
            cells = [*place, setting, f"{median(speed):.2f}", f"{min(speed):.2f} to {max(speed):.2f}"]
            cells += [f"{cpu:.2f}", f"{100 * median(run['idle'] for run in own):.0f} %"]
            for name in ("staleness", "mixed", "length"):
                cells.append("" if own[0][name] is None else f"{median(run[name] for run in own):.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

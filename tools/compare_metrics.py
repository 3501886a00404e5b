"""Show that a change of the code has changed no metric: record the quickstart's jobs, and compare two
recordings.

    python tools/compare_metrics.py record /tmp/old --python ../megarl-before/.venv/bin/python
    python tools/compare_metrics.py record /tmp/new
    python tools/compare_metrics.py compare /tmp/old /tmp/new [--renamed old/name=new/name ...]

`record` runs supervised fine-tuning in two stages, GRPO and PPO, each with two data-parallel ranks and with
two tensor-parallel ranks, all with the same seed. `compare` prints every metric that differs in any bit, and
then exits with 1. Times, throughput and memory are not compared, because they differ from run to run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.metrics import current_name

NOT_COMPARED = ("time", "throughput", "memory")
MAKE_DATA = """
import pathlib, sys
sys.path.insert(0, sys.argv[1] + "/examples")
try:
    from sums.files import make_sums
except ModuleNotFoundError:  # a tree in which the quickstart's task is not in examples/ yet
    from megarl.data.sums_files import make_sums
make_sums(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
"""
"""Program that writes the data. Arguments: the recorded tree, the folder for the data, the seed."""
LAYOUTS = {"dp2": [], "tp2": ["--tensor-model-parallel-size", "2", "--sequence-parallel"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the jobs; about six minutes on two cores")
    recording.add_argument("folder", type=Path, help="where the runs are written; must not exist")
    recording.add_argument("--python", default=sys.executable, help="interpreter of the megarl to record")
    recording.add_argument("--seed", type=int, default=0)
    recording.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument(
        "--renamed", nargs="*", default=[], metavar="OLD=NEW", help="metrics that have new names"
    )
    arguments = parser.parse_args()
    if arguments.command == "record":
        return record(arguments.folder.resolve(), arguments.python, arguments.seed, arguments.layouts)
    differences = list(
        compare(arguments.old, arguments.new, dict(pair.split("=") for pair in arguments.renamed))
    )
    for difference in differences:
        print(difference)
    print(f"{len(differences)} differences", file=sys.stderr)
    return 1 if differences else 0


def record(folder: Path, python: str, seed: int, layouts: list[str]) -> int:
    """Run all jobs of all layouts, one after another. Returns the exit code of the first job that fails, or
    0."""
    folder.mkdir(parents=True)
    find_tree = "import megarl, os; print(os.path.dirname(os.path.dirname(megarl.__file__)))"
    tree = subprocess.run(
        [python, "-P", "-c", find_tree], check=True, capture_output=True, text=True
    ).stdout.strip()
    data = folder / "data"
    subprocess.run([python, "-P", "-c", MAKE_DATA, tree, str(data), str(seed)], check=True)
    for layout in layouts:
        for job, flags in jobs(folder, data, layout).items():
            command = [python, "-P", "-m", "megarl.cli", "train", f"@{tree}/configs/quickstart_{job}.args"]
            command += ["--seed", str(seed), "--save", str(folder / layout / job), *LAYOUTS[layout], *flags]
            print(" ".join(command), flush=True)
            if code := subprocess.call(command, cwd=folder):
                return code
    return 0


def jobs(folder: Path, data: Path, layout: str) -> dict[str, list[str]]:
    """Return job -> flags for the jobs of one layout in order, each with its model and data."""
    runs = folder / layout
    prompts = ["--train-data", f"{data}/train.jsonl", "--eval-data", f"{data}/test.jsonl"]
    return {
        "sft": ["--model", f"{data}/model", "--train-data", f"{data}/sft_worked.jsonl"],
        "sft_mixed": ["--model", f"{runs}/sft/hf", "--train-data", f"{data}/sft_mixed.jsonl"],
        "grpo": ["--model", f"{runs}/sft_mixed/hf", *prompts],
        "ppo": ["--model", f"{runs}/sft_mixed/hf", *prompts],
    }


def compare(old: Path, new: Path, renamed: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per difference between the metrics.jsonl of two recordings."""
    old_files, new_files = (
        {path.relative_to(folder): path for path in folder.glob("**/metrics.jsonl")} for folder in (old, new)
    )
    if not old_files:
        raise SystemExit(f"{old} holds no metrics.jsonl: record it first")
    for name in sorted(old_files.keys() | new_files.keys()):
        if name not in old_files or name not in new_files:
            yield f"{name}: only in {old if name in old_files else new}"
            continue
        yield from (
            f"{name}: {line}"
            for line in compare_rows(_rows(old_files[name]), _rows(new_files[name]), renamed)
        )


def compare_rows(old: list[dict], new: list[dict], renamed: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per difference between the rows of two metrics.jsonl. Names of earlier versions that
    megarl knows need not be in `renamed`."""
    if len(old) != len(new):
        yield f"{len(old)} rows against {len(new)}"
    for row, (before, after) in enumerate(zip(old, new)):
        before = {renamed.get(name, current_name(name)): value for name, value in before.items()}
        for name in [*before, *(name for name in after if name not in before)]:
            if _is_compared(name) and before.get(name) != after.get(name):
                yield f"row {row}, {name}: {before.get(name)!r} against {after.get(name)!r}"


def _is_compared(name: str) -> bool:
    """Return whether a metric is compared. Times are not, e.g. time/step_s, or time_2/step_s of actor 2."""
    return name.split("/")[0].split("_")[0] not in NOT_COMPARED


def _rows(path: Path) -> list[dict]:
    # Floats are written so that reading them gives the same bits again.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())

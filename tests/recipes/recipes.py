"""What the recipes in configs/ need, by `megarl check`: for test_recipes.py.

python -m tests.recipes.recipes     # writes the recipes' second lines and the page's table"""

from __future__ import annotations

import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

ROOT = Path(__file__).resolve().parents[2]

from megarl.algorithms import REGISTRY
from megarl.checks.disk import checkpoint_bytes, export_bytes, new_checkpoints
from megarl.checks.job import Report, examine
from megarl.checks.machine import Machine
from megarl.checks.memory import estimate, peak_bytes, phase_bytes
from megarl.config.loader import load_config
from megarl.config.mesh import role_meshes
from tests.config.conftest import ROW, write_tokenizer

PAGE = ROOT / "docs" / "recipes.md"
FIRST = ROOT / "configs" / "qwen2.5_0.5b_gsm8k_grpo.args"
_DEVICES = re.compile(r"^(?:--nnodes (\d+) )?--nproc-per-node (\d+)$", re.MULTILINE)


def num_devices(recipe: Path) -> int:
    nodes, ranks = _DEVICES.search(recipe.read_text()).groups(default="1")
    return int(nodes) * int(ranks)


RECIPES = sorted(
    [FIRST, *(ROOT / "configs" / "recipes").glob("*.args")], key=lambda path: (num_devices(path), path.stem)
)
"""By number of GPUs."""
GPU_GB = re.compile(r"GPUs? of (\d+) GB")
_FIRST_NAMES = (
    "--model models/Qwen2.5-0.5B-Instruct --train-data data/gsm8k_train.parquet --eval-data "
    "data/gsm8k_test.parquet --save runs/gsm8k"
)
"""What the header of the first recipe says that its reader adds."""


@dataclass(frozen=True)
class Needs:
    """What a recipe needs.

    Args:
        gpu_gb: memory of a GPU for which the recipe is.
        peak_gb, update_gb: estimated memory of the rank that needs most, in the largest phase of a step and
            in an update.
        disk_gb: checkpoints and exports that exist at once."""

    devices: int
    gpu_gb: int
    peak_gb: int
    update_gb: int
    disk_gb: int

    @property
    def line(self) -> str:
        gpus = "one GPU" if self.devices == 1 else f"{self.devices} GPUs"
        machines = f" on {self.devices // 8} machines" if self.devices > 8 else ""
        return (
            f"# Needs {gpus} of {self.gpu_gb} GB{machines}: {self.peak_gb} GB each at the peak, as `megarl "
            f"check --gpu-memory {self.gpu_gb}` estimates. Disk for --save: {self.disk_gb} GB."
        )


def make_reader_folder(folder: Path) -> None:
    """Make the working directory of a recipe's reader: models without weights and data of one row,
    where recipes name them."""
    (folder / "models").mkdir()
    for model in (ROOT / "tests" / "recipes" / "models").glob("*/config.json"):
        (folder / "models" / model.parent.name).mkdir()
        (folder / "models" / model.parent.name / "config.json").write_text(model.read_text())
    (folder / "tokenizer").mkdir()
    write_tokenizer(folder / "tokenizer")
    (folder / "data").mkdir()
    for name in ("gsm8k_train", "gsm8k_test", "math_train", "math_test", "dapo_math"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), folder / "data" / f"{name}.parquet")


def arguments(recipe: Path) -> list[str]:
    """Return the arguments of a recipe in its reader's folder, with stand-ins for weights and tokenizer."""
    names = _FIRST_NAMES.split() if recipe == FIRST else []
    return [f"@{recipe}", *names, "--random-init", "--tokenizer-model", "tokenizer"]


def gpu_gb(recipe: Path) -> int:
    """Return the memory of the GPUs that the header names."""
    return int(GPU_GB.search(recipe.read_text())[1])


def checked(recipe: Path) -> tuple[Report, Needs, str]:
    """Return the report of `megarl check`, what the recipe needs, and its row of the table."""
    config = load_config(arguments(recipe), REGISTRY)
    count, machine = (
        config.placement.world_size,
        Machine(None, has_gpu=True, gpu_bytes=gpu_gb(recipe) * 10**9, is_this=False),
    )
    report = examine(config, count, machine=machine)
    parts = set(estimate(config, count, machine).values())
    disk = new_checkpoints(config) * checkpoint_bytes(config) + export_bytes(config)
    needs = Needs(
        devices=count,
        gpu_gb=gpu_gb(recipe),
        peak_gb=_gb(max(map(peak_bytes, parts))),
        update_gb=_gb(max(phase_bytes(of_rank, "update") for of_rank in parts)),
        disk_gb=_gb(disk),
    )
    actor, engine = role_meshes(config, count)["actor"], role_meshes(config, count)["rollout"]
    model = Path(config.model.model).name
    critic = Path(config.model.critic_folder).name
    algorithm = type(config.algorithm).__name__
    if algorithm == "PPO" and critic != model:
        algorithm += f", critic {critic}"
    name = recipe.relative_to(ROOT)
    row = (
        f"| [{name.stem}](../{name}) | {model} | {algorithm} | {count} x {needs.gpu_gb} GB "
        f"| {needs.update_gb} | {actor.tp} / {actor.pp} / {actor.cp} / {actor.ep} | {engine.tp} "
        f"| {source(recipe)} |"
    )
    return report, needs, row


def source(recipe: Path) -> str:
    """Return where the settings are from, as the header says it."""
    found = re.search(r"^# Settings: (.*)\.$", recipe.read_text(), re.MULTILINE)
    return found[1] if found else "ours"


def _gb(size: int) -> int:
    return math.ceil(size / 1e9)


def write() -> None:
    """Write the second line of each recipe and the table of the page."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_reader_folder(Path(folder))
        os.chdir(folder)
        for recipe in RECIPES:
            report, needs, row = checked(recipe)
            rows.append(row)
            print(report.lines[0], needs, *report.errors, *report.estimates, flush=True)
            if recipe != FIRST:
                lines = recipe.read_text().splitlines(keepends=True)
                recipe.write_text("".join([lines[0], f"{needs.line}\n", *lines[2:]]))
    text = PAGE.read_text()
    start, end = text.index("| ["), text.index("\n\n", text.index("| ["))
    PAGE.write_text(text[:start] + "\n".join(rows) + text[end:])


if __name__ == "__main__":
    write()

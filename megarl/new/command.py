"""Lay out a task of your own in a new folder: a script that writes its rows, its reward, and args files.

    megarl new reverse              the folder reverse/, with a README that says what to run
    megarl new tasks/reverse        anywhere else

The task runs as it is: a model learns to spell words backwards. Edit the files until the task is yours.
docs/own_task.md walks through it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.rules_files import free_name
from megarl.files.writing import obstacle, writing
from megarl.inspect.arguments import Parser

FILES = ("README.md", "make_data.py", "reward.py", "sft.args", "grpo.args")
"""The files of a task, in megarl/new/template."""
_NAME = "{name}"
"""What stands for the task's name in README.md."""


def main(argv: Sequence[str]) -> int:
    parser = Parser("new", __doc__)
    parser.add_argument("name", metavar="NAME", type=Path, help="folder to write; it must be new or empty")
    folder = parser.parse(argv).name
    write_task(folder)
    lines = [f"{folder}: {', '.join(FILES)}", "Next:"]
    lines += [] if folder.resolve() == Path.cwd() else [f"    cd {folder}"]
    lines += [
        "    python make_data.py               # rows: data/sft.jsonl, data/train.jsonl, data/test.jsonl",
        "    megarl tiny-model --out model     # a model with random weights and a tokenizer",
        "    megarl train @sft.args",
        "    megarl train @grpo.args",
    ]
    sys.stdout.write(
        "".join(f"{line}\n" for line in [*lines, "README.md says what each does and what to edit."])
    )
    return 0


def write_task(folder: Path) -> None:
    """Write the files of a task into a folder. Raises: ConfigError if the folder is not empty."""
    if (why := obstacle(folder)) is not None:
        raise ConfigError([f"NAME ({folder}): cannot be written: {why}. Name another folder."])
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            [f"NAME ({folder}): exists and is not empty; nothing in it was changed. Try {free_name(folder)}."]
        )
    template = resources.files("megarl.new") / "template"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            text = (template / name).read_text(encoding="utf-8")
            if name == "README.md":
                text = text.replace(_NAME, folder.resolve().name)
            (folder / name).write_text(text, encoding="utf-8")

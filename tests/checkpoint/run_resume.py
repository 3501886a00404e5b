"""Jobs of supervised fine-tuning in one process, interrupted, damaged and held up in every way.
test_resume.py judges what they leave.

python tests/checkpoint/run_resume.py OUT_FOLDER
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
import sys
import threading
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from megarl.algorithms import REGISTRY
from megarl.checkpoint import manifest as manifest_module
from megarl.checkpoint import save as save_module
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.convert import main as convert
from megarl.files.checkpoints import read_job, write_job
from megarl.trainer.attempt import Attempt, SupersededError
from megarl.trainer.checkpointer import NoWholeCheckpoint
from megarl.runtime.executor import RemoteError
from megarl.trainer.executors import inline_ranks
from megarl.trainer.loop import train as run_loop
from megarl.trainer.own_ranks import Started
from megarl.trainer.preflight import read_inputs
from megarl.trainer.trainer import Trainer
from megarl.loggers.console import Progress
from sums.files import make_sums

NUM_ROWS = 40  # five steps are a pass, so a cursor that began anew would show


@contextlib.contextmanager
def opened(
    out: Path, save: str, *flags: str, rows: Path | None = None
) -> Iterator[tuple[Trainer, io.StringIO]]:
    """A job that was set up and restored, and what it reports."""
    config = load_config(
        [
            "--algorithm",
            "sft",
            "--executor",
            "inline",
            "--model",
            str(out / "data" / "model"),
            "--global-batch-size",
            "8",
            "--lr",
            "1e-2",
            "--lr-warmup-iters",
            "2",
            "--lr-decay-style",
            "linear",
            "--lr-decay-iters",
            "12",
            "--max-prompt-length",
            "64",
            "--max-response-length",
            "64",
            "--save",
            str(out / save),
            "--train-data",
            str(rows or out / "rows.jsonl"),
            *flags,
        ],
        REGISTRY,
    )
    inputs, told = read_inputs(config, 1), io.StringIO()
    shown = Progress(config.batch.train_iters, told, terminal=False)
    with inline_ranks(config) as executor:
        with Trainer(config, started=Started(executor, inputs, 1, shown)) as trainer:
            yield trainer, told


def train(out: Path, save: str, steps: int, *flags: str, rows: Path | None = None) -> str:
    with opened(out, save, "--train-iters", str(steps), *flags, rows=rows) as (trainer, told):
        run_loop(trainer)
    return told.getvalue()


def interrupted(out: Path) -> dict[str, str]:
    train(out, "whole", 8)
    train(out, "parts", 5, "--save-interval", "3")
    shutil.copytree(out / "parts", out / "parts_after_5")
    told = train(
        out, "parts", 8, "--save-interval", "3", "--load", str(out / "parts" / "checkpoints" / "step_000003")
    )
    shutil.copytree(
        out / "parts_after_5", out / "lost"
    )  # a job that ended between its last checkpoint and its export
    shutil.rmtree(out / "lost" / "hf")
    train(out, "lost", 5, "--load", str(out / "lost"))
    for _ in range(2):  # the loss falls below 2.5 at step 6
        train(out, "early", 8, "--exit-loss", "2.5", "--save-interval", "5", "--load", str(out / "early"))
    return {
        "own folder": told,
        "another folder": train(out, "elsewhere", 8, "--load", str(out / "parts_after_5")),
        "nothing there": train(out, "requeued", 2, "--save-interval", "2", "--load", str(out / "requeued")),
        "there now": train(out, "requeued", 4, "--save-interval", "2", "--load", str(out / "requeued")),
    }


def few_rows(out: Path) -> None:
    """Five rows in batches of eight, without and with an interruption: every step holds rows twice."""
    with open(out / "rows.jsonl") as rows:
        (out / "five.jsonl").write_text("".join(itertools.islice(rows, 5)))
    five, half = out / "five.jsonl", out / "few" / "checkpoints" / "step_000002"
    train(out, "few", 4, "--save-interval", "2", rows=five)
    train(out, "few_half", 4, "--load", str(half), rows=five)


def other_rows(out: Path) -> list[str]:
    """What is said before anything is built where two weighted files change places, and where --sft-data has
    other rows than in the run."""
    five, rest, run = out / "five.jsonl", out / "rest.jsonl", out / "weighted"
    with open(out / "rows.jsonl") as rows:
        rest.write_text("".join(itertools.islice(rows, 5, None)))
    flags = ("--train-data-weights", "1", "1", "--save-interval", "2")
    with opened(out, "weighted", str(rest), *flags, "--train-iters", "2", rows=five) as (trainer, _):
        run_loop(trainer)
    told: list[str] = []
    try:
        more = ("--train-iters", "4", "--load", str(run))
        with opened(out, "weighted", str(five), *flags, *more, rows=rest):
            pass
    except ConfigError as error:
        told += error.errors
    body = read_job(run / "checkpoints" / "step_000002")
    body["actors"][""]["sft"] = {"num_rows": 7}  # as of a run that samples
    del body["actors"][""]["cursor"]["mixture"]
    write_job(run / "checkpoints" / "step_000002", body)
    words = (
        f"--algorithm grpo --kl-mode none --executor inline --model {out}/data/model --load {run} "
        f"--save {run} "
        f"--train-data {out}/data/train.jsonl --sft-data {five} --train-iters 4 --max-prompt-length 64 "
        "--max-response-length 64"
    )
    try:
        read_inputs(load_config(words.split(), REGISTRY), 1)
    except ConfigError as error:
        told += error.errors
    return told


def flip_last_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


DAMAGES = {
    "truncated": lambda folder: os.truncate(folder / "actor" / "weights-00000.safetensors", 5000),
    "flipped": lambda folder: flip_last_byte(folder / "actor" / "exp_avg-00000.safetensors"),
    "missing": lambda folder: (folder / "actor" / "exp_avg_sq-00000.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "actor" / "checkpoint.json").unlink(),
    "no job": lambda folder: (folder / "job.json").unlink(),
    "job changed": lambda folder: (folder / "job.json").write_text(
        (folder / "job.json").read_text().replace('"step": 5', '"step": 4')
    ),
    "another manifest": lambda folder: shutil.copy(
        folder.with_name("step_000003") / "actor" / "checkpoint.json", folder / "actor"
    ),
}


def damaged(out: Path) -> dict[str, dict[str, object]]:
    """How a job goes on from a run whose newest checkpoint, or all of them, are damaged."""
    report: dict[str, dict[str, object]] = {}
    for name, damage in DAMAGES.items():
        run = out / "damaged" / name
        shutil.copytree(out / "parts_after_5", run)
        damage(run / "checkpoints" / "step_000005")
        with opened(out, f"damaged/{name}", "--train-iters", "8", "--load", str(run)) as (trainer, told):
            report[name] = {
                "step": trainer.step,
                "told": told.getvalue(),
                "rows": trainer.state.first.cursor.next_rows(3),
            }
    run = out / "damaged" / "flipped"  # its step 5 is set aside now
    DAMAGES["flipped"](run / "checkpoints" / "step_000003")
    before = sorted(str(path) for path in run.rglob("*"))
    try:
        with opened(out, "damaged/flipped", "--train-iters", "8", "--load", str(run)):
            pass
    except NoWholeCheckpoint as error:
        report["all"] = {
            "told": str(error),
            "untouched": before == sorted(str(path) for path in run.rglob("*")),
        }
    return report


def unreadable(out: Path) -> dict[str, object]:
    """What becomes of a run whose newest checkpoint meets an I/O error on a rank."""
    run, real = out / "unreadable", manifest_module.file_digest
    shutil.copytree(out / "parts_after_5", run)
    before = sorted(str(path) for path in run.rglob("*"))

    def file_digest(path: Path) -> str:
        if "step_000005" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    with unittest.mock.patch.object(manifest_module, "file_digest", file_digest):
        try:
            with opened(out, "unreadable", "--train-iters", "8", "--load", str(run)):
                told = "it went on"
        except RemoteError as error:
            told = str(error)
    return {"told": told, "untouched": before == sorted(str(path) for path in run.rglob("*"))}


def held_up(out: Path) -> list[str]:
    """What happens in which order while the disk does not take the first checkpoint's file."""
    events, released, real = [], threading.Event(), save_module.write_tensors

    def slow(path: Path, entries: object) -> object:
        events.append("write begins")
        assert released.wait(60)
        events.append("write ends")
        return real(path, entries)

    with (
        opened(out, "held", "--train-iters", "4") as (trainer, _),
        unittest.mock.patch.object(save_module, "write_tensors", slow),
    ):
        for step in trainer.steps():
            trainer.update(trainer.rollout())
            events.append(f"step {step}")
            events += [
                f"visible {path.name}" for path in sorted((out / "held" / "checkpoints").glob("step_*"))
            ]
            if step == 1:
                trainer.save_checkpoint()
                while not events.count("write begins"):
                    pass
            if step == 3:
                released.set()
                trainer.checkpointer.wait()
    return [event for event, _ in itertools.groupby(events)]


def failed_after_writing(out: Path) -> list[str]:
    """All files are written, but the driver has not asked yet when something else ends the job."""
    with contextlib.suppress(KeyError), opened(out, "failed", "--train-iters", "4") as (trainer, _):
        trainer.update(trainer.rollout())
        trainer.save_checkpoint()
        while not (out / "failed" / "checkpoints" / ".step_000001.attempt_1.partial" / "actor").is_dir():
            pass
        raise KeyError("of the user's loop")
    return sorted(path.name for path in (out / "failed" / "checkpoints").iterdir())


def superseded(out: Path) -> dict[str, object]:
    """Another attempt takes the run over before this one writes a checkpoint, and while it writes one."""
    told = []
    for name, is_begun in (("superseded", False), ("superseded while writing", True)):
        with contextlib.suppress(SupersededError), opened(out, name, "--train-iters", "4") as (trainer, _):
            trainer.update(trainer.rollout())
            if is_begun:
                trainer.save_checkpoint()
            Attempt(out / name, 0)
            try:
                trainer.checkpointer.wait() if is_begun else trainer.save_checkpoint()
            except SupersededError as error:
                told.append(str(error))
                raise
    names = ("superseded", "superseded while writing")
    folders = [path for name in names for path in (out / name / "checkpoints").glob("*")]
    return {"told": told, "left": sorted(path.name for path in folders)}


def disk_full(out: Path) -> dict[str, object]:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if "step_000004" in str(path) and path.name.startswith("exp_avg-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with unittest.mock.patch.object(os, "fsync", fsync):
        try:
            train(out, "full", 6, "--save-interval", "2")
        except RemoteError as error:
            return {
                "told": str(error),
                "left": sorted(path.name for path in (out / "full" / "checkpoints").iterdir()),
            }
    return {}


def main(out: Path) -> None:
    make_sums(out / "data", seed=0)
    with open(out / "data" / "sft_worked.jsonl") as rows:
        (out / "rows.jsonl").write_text("".join(itertools.islice(rows, NUM_ROWS)))
    few_rows(out)
    report = {
        "told": interrupted(out),
        "other rows": other_rows(out),
        "damaged": damaged(out),
        "unreadable": unreadable(out),
        "held up": held_up(out),
        "disk full": disk_full(out),
        "superseded": superseded(out),
        "failed": failed_after_writing(out),
    }
    report["best"] = train(
        out,
        "best",
        6,
        "--save-interval",
        "1",
        "--keep",
        "1",
        "--best-metric",
        "policy/loss",
        "--best-metric-mode",
        "max",
    )
    report["unknown"] = train(out, "unknown", 2, "--save-interval", "1", "--best-metric", "eval/reward")
    report["converted"] = convert(
        [
            "--model",
            str(out / "data" / "model"),
            "--load",
            str(out / "parts" / "checkpoints" / "step_000008" / "actor"),
            "--save",
            str(out / "converted"),
        ]
    )
    (out / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Run whole jobs as a user would, on the sums task's untrained 0.37M-parameter model, and read what they
wrote."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch import PRELOADED_ENGINES, preloaded_python, without_warnings_of_machine

COMMON = [
    "--algorithm",
    "grpo",
    "--nproc-per-node",
    "2",
    "--train-iters",
    "3",
    "--num-prompts",
    "4",
    "--num-samples-per-prompt",
    "4",
    "--global-batch-size",
    "8",
    "--lr",
    "1e-3",
    "--max-prompt-length",
    "32",
    "--max-response-length",
    "16",
    "--temperature",
    "0.9",
    "--rollout-max-num-seqs",
    "32",
    "--reward-function",
    f"{Path(__file__).with_name('reward.py')}:lower_case",
]

STARTING = ("starting", "evaluating ")
"""Beginnings of the lines that every job prints before its first step."""
SECRETS = {
    name: f"secret-{secrets.token_hex(16)}"
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MEGARL_JOB_SECRET")
}
"""In the environment of every job here."""
LAYOUTS = {  # actor -> engines
    "one": ("--nproc-per-node", "1"),
    "dp2_to_tp1": (),
    "dp2_stacked_to_tp1": ("--qkv-layout", "stacked"),
    "dp2_copied_to_tp1": ("--no-reshard-alias",),
    "tp2_to_tp2": ("--tensor-model-parallel-size", "2", "--rollout-tensor-parallel-size", "2"),
    "dp2_to_tp2": ("--rollout-tensor-parallel-size", "2"),
    "tp2_to_tp1": ("--tensor-model-parallel-size", "2"),
    "pp2_to_tp1": ("--pipeline-model-parallel-size", "2"),
    "rank_0_to_tp1": ("--actor-ranks", "0"),
    "rank_0_to_rank_1": ("--actor-ranks", "0", "--rollout-ranks", "1"),  # vLLM in processes of its own
    "tp2_to_transformers": ("--tensor-model-parallel-size", "2", "--rollout-backend", "transformers"),
    "rank_0_to_transformers_on_1": (
        *("--actor-ranks", "0", "--rollout-ranks", "1"),
        *("--rollout-backend", "transformers"),
    ),
}
QUICK = ("one", "dp2_to_tp1", "tp2_to_tp2", "tp2_to_transformers")


def layouts(*without: str) -> list:
    """For `parametrize`: those that the default suite runs, and the others marked slow."""
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly)
        for name in LAYOUTS
        if name not in without
    ]


@dataclass
class Job:
    returncode: int
    output: str
    folder: Path

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[dict]:
        return [row for row in self.metrics if "reward/mean" in row]


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's and folder's bytes and time of change."""
    return {
        str(p.relative_to(folder)): (p.read_bytes() if p.is_file() else b"", p.stat().st_mtime_ns)
        for p in folder.rglob("*")
    }


def train(data: Path, save: Path, *flags: str, fault: str | None = None, timeout: float = 240) -> Job:
    """`megarl train`; with a fault, torchrun on faulty_train.py, which plants it in the workers."""
    arguments = [
        *COMMON,
        "--model",
        str(data / "model"),
        "--train-data",
        str(data / "train.jsonl"),
        "--save",
        str(save),
    ]
    arguments = replace_flags(arguments, list(flags))
    if fault is None:
        command = [preloaded_python(), "-m", "megarl.cli", "train", *arguments]
    else:
        command = [
            preloaded_python(),
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(Path(__file__).with_name("faulty_train.py")),
            fault,
            *arguments,
        ]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=save.parent,
        env=dict(os.environ, PYTHONSAFEPATH="1", **PRELOADED_ENGINES, **SECRETS),
    )
    check_nothing_is_told(done.stdout, save)
    return Job(done.returncode, without_warnings_of_machine(done.stdout), save)


_SAME = ("response/length_mean", "batch/tokens")
_CLOSE = (
    "reward/mean",
    "policy/grad_norm",
    "policy/entropy",
    "critic/loss",
    "critic/grad_norm",
    "kl/per_response",
)


def check_first_step(job: Job, other: Job, rel: float) -> None:
    """Trainer and engine agreed in every step of both, and the first step is the same but for rounding: they
    sum in another order."""
    for one in (job, other):
        assert one.returncode == 0, one.output
        assert all(row["mismatch/max_abs"] <= 1e-4 for row in one.steps) and len(one.steps) == 3
    ours, theirs = job.steps[0], other.steps[0]
    assert {key: ours[key] for key in _SAME} == {key: theirs[key] for key in _SAME}
    shared = ours.keys() & {*_CLOSE}
    assert shared and {key: ours[key] for key in shared} == pytest.approx(
        {key: theirs[key] for key in shared}, rel=rel, abs=1e-6
    )


def check_nothing_is_told(output: str, folder: Path) -> None:
    """No secret of the environment is in what a job printed or wrote, however it went."""
    for name, secret in SECRETS.items():
        assert secret not in output, name
        assert [
            path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()
        ] == [], name


def replace_flags(arguments: list[str], flags: list[str]) -> list[str]:
    """Flags given twice are an error, so those of the test take the place of the common ones."""
    given = {f for f in flags if f.startswith("--")}
    given |= (
        {"--reward-function"} if given & {"--env", "--agent-command", "--env-verifiers"} else set()
    )  # they give the rewards
    kept, skip = [], False
    for word in arguments:
        if word.startswith("--"):
            skip = word in given
        if not skip:
            kept.append(word)
    return kept + flags

"""A job that is killed again and again, each time another process of it in another phase, and started again
with the same command, ends where a job that nobody killed ends: metrics and weights bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.jobs import COMMON, replace_flags
from tests.faults.cases import IN_ENGINE, PLACES
from tests.faults.harness import Fault, Job, megarl

STEPS = 10
SECOND_STEP = {
    phase: (target, 3 if phase == "sync" else 2) for phase, (target, _, _) in PLACES.items()
}  # of those that a process runs
PHASES = ("rollout", "reward", "log-probs", "update", "sync", "save")
VICTIMS = ("rank 0", "rank 1", "driver")
CHAINS = {
    f"chain_{i}": [(VICTIMS[(i + n) % 3], phase) for n, phase in enumerate(PHASES)] for i in range(3)
}  # every victim in every phase
ENGINE = [
    ("engine", "rollout"),
    ("driver", "rollout"),
    ("engine", "sync"),
    ("rank 0", "update"),
    ("rank 1", "sync"),
]
OUT_OF_PROCESS = ("--actor-ranks", "0", "--rollout-ranks", "1")
MEASURED = ("time/", "throughput/", "memory/")


def fault(victim: str, phase: str) -> Fault:
    if victim == "engine":
        return Fault("SIGKILL", "engine", *IN_ENGINE[phase][:2])
    if victim == "driver":
        return Fault(
            "SIGKILL",
            "rank 1" if phase in ("rollout", "sync") else "rank 0",
            *SECOND_STEP[phase],
            victim="driver",
        )
    return Fault("SIGKILL", victim, *SECOND_STEP[phase])


def command(data: Path, save: Path, flags: tuple[str, ...]) -> list[str]:
    arguments = [
        *COMMON,
        "--model",
        str(data / "model"),
        "--train-data",
        str(data / "train.jsonl"),
        "--save",
        str(save),
        "--load",
        str(save),
        "--save-interval",
        "1",
    ]
    return megarl("train", replace_flags(arguments, ["--train-iters", str(STEPS), *flags]))


def run_job(folder: Path, command: list[str]) -> Job:
    job = Job(folder, command)
    try:
        assert job.launcher.wait(600) == 0, job.stderr()
    finally:
        job.end()
    return job


def metrics(save: Path) -> list[dict]:
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(sums_data, tmp_path_factory):
    """Flags -> the run folder of a job that nobody killed; run once."""
    folders: dict[tuple[str, ...], Path] = {}

    def run(*flags: str) -> Path:
        if flags not in folders:
            folder = tmp_path_factory.mktemp("uninterrupted")
            run_job(folder, command(sums_data, folder / "run", flags))
            folders[flags] = folder / "run"
        return folders[flags]

    return run


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "kills, flags",
    [*((kills, ()) for kills in CHAINS.values()), (ENGINE, OUT_OF_PROCESS)],
    ids=[*CHAINS, "engine"],
)
def test_a_job_that_is_killed_in_every_phase_ends_where_one_that_is_not_does(
    sums_data, tmp_path, uninterrupted, kills, flags
):
    save, again = tmp_path / "run", command(sums_data, tmp_path / "run", flags)
    for victim, phase in kills:
        (tmp_path / "hit").unlink(missing_ok=True)
        (tmp_path / "struck").unlink(missing_ok=True)
        job = Job(tmp_path, again, fault(victim, phase))
        try:
            outcome = job.watch_end(job.wait_for_hit(), limit_s=25.0)
        finally:
            job.end()
        assert outcome.exit_code not in (0, None) and not outcome.orphans and not outcome.shared_memory, (
            victim,
            phase,
            outcome,
        )
    run_job(tmp_path, again)
    assert [row["step"] for row in metrics(save)] == list(range(1, STEPS + 1))
    assert metrics(save) == metrics(uninterrupted(*flags))
    weights, expected = (
        load_file(folder / "hf" / "model.safetensors") for folder in (save, uninterrupted(*flags))
    )
    assert (
        all(torch.equal(value, weights[name]) for name, value in expected.items())
        and weights.keys() == expected.keys()
    )

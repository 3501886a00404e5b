"""How many ranks fit the GPUs of a machine: counted from a folder of device files, chosen by a range of
--nproc-per-node, and checked.

pytest tests/config/test_gpus.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.checks.job import check_everything, examine
from megarl.checks.machine import Machine, this_machine
from megarl.config import installed
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(n, visible) has n GPUs, a CUDA build of PyTorch, and that CUDA_VISIBLE_DEVICES."""

    def make(count: int, visible: str | None = None, torch: str = "2.13.0+cu130") -> None:
        devices = tmp_path / "dev"
        devices.mkdir()
        for name in (
            ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))) if count else ()
        ):
            (devices / name).touch()
        monkeypatch.setattr(installed, "_DEVICES", devices)
        monkeypatch.setattr(installed.importlib.metadata, "version", lambda name: torch)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


@pytest.mark.parametrize(
    "count, visible, expected",
    [
        (0, None, 0),
        (1, None, 1),
        (12, None, 12),
        (4, "", 0),
        (4, "-1", 0),
        (4, "2,0", 2),
        (4, "1,7,2", 1),
        (4, "GPU-8ab7,MIG-5c", 2),
        (0, "0", 0),
    ],
)
@pytest.mark.processes("children")
def test_gpus_are_counted_as_cuda_counts_them(machine, count, visible, expected):
    """A number that is not there ends the list: CUDA's documentation of CUDA_VISIBLE_DEVICES."""
    machine(count, visible)
    assert installed.visible_gpus() == expected
    assert (this_machine().has_gpu, this_machine().num_gpus) == (expected > 0, expected or None)


def test_a_cpu_build_of_pytorch_sees_none(machine):
    machine(4, torch="2.13.0+cpu")
    assert installed.visible_gpus() == 0


@pytest.mark.parametrize("count, expected", [(0, 2), (1, 1), (2, 2), (8, 2)])
def test_the_quickstart_takes_two_ranks_where_they_fit(machine, count, expected, tmp_path):
    """Its model is tiny: the first job of a machine with eight GPUs, some of them busy, leaves six alone."""
    machine(count)
    for recipe in CONFIGS.glob("quickstart_*.args"):
        assert load_config([f"@{recipe}"], REGISTRY).placement.nproc_per_node == expected, recipe
    assert load_config([f"@{recipe}", "--nproc-per-node", "3-5"], REGISTRY).placement.nproc_per_node == {
        0: 5,
        8: 5,
    }.get(count, 3)


@pytest.mark.parametrize("value", ["0-2", "4-2", "1-", "-2", "1-2-3", "one"])
def test_what_is_no_number_of_ranks_is_refused(value):
    with pytest.raises(
        ConfigError,
        match=r"--nproc-per-node \(?"
        + value
        + r"\)?.*must be (a whole number or a range like 1-8|at least 1)",
    ):
        load_config([f"@{CONFIGS / 'quickstart_sft.args'}", "--nproc-per-node", value], REGISTRY)


@pytest.mark.parametrize(
    "flags, ranks, gpus_here, advice",
    [
        ("", 2, 1, "Try --nproc-per-node 1."),
        ("--tensor-model-parallel-size 2", 4, 3, "Try --nproc-per-node 2."),  # 3 ranks are no layout
        (
            "--tensor-model-parallel-size 2",
            2,
            1,
            "Use a machine with more, or smaller parallel sizes and lists of ranks.",
        ),
        ("", 2, 2, None),
        ("", 2, None, None),  # a CPU, or --gpu-memory: another machine
    ],
)
def test_every_rank_needs_a_gpu(job, flags, ranks, gpus_here, advice):
    config = load_config([job, *flags.split()], REGISTRY)
    found = examine(
        config, ranks, machine=Machine(10**12, gpus_here is not None, 80 * 10**9, gpus_here)
    ).errors
    rule = (
        f"--nproc-per-node ({ranks}): needs as many GPUs on this machine, one for each rank, and "
        f"it has {gpus_here}. "
    )
    assert list(found) == ([] if advice is None else [rule + advice])


@pytest.mark.parametrize(
    "ranks, machine, advice",
    [
        (8, Machine(10**12, num_cores=2), "Try --nproc-per-node 2."),
        (2, Machine(10**12, num_cores=1), "Try --nproc-per-node 1."),
        (2, Machine(10**12, num_cores=2), None),
        (2, Machine(10**12), None),  # not known
        (2, Machine(10**12, True, 80 * 10**9, 8, num_cores=1), None),  # the ranks compute on GPUs
    ],
)
def test_more_ranks_than_cores_are_warned_of(job, ranks, machine, advice, monkeypatch, caplog):
    config = load_config([job], REGISTRY)
    report = examine(config, ranks, machine=machine)
    assert report.errors == () and len(report.warnings) == (advice is not None)
    said = [line for line in report.lines if line.startswith("warning: ")]
    assert said == [f"warning: {warning}" for warning in report.warnings]
    monkeypatch.setattr("megarl.checks.job.this_machine", lambda: machine)
    check_everything(config, ranks)
    assert [record.getMessage() for record in caplog.records] == said
    if advice is not None:
        assert f"--nproc-per-node ({ranks}): this machine has {machine.num_cores} CPU core" in said[0]
        assert said[0].endswith(advice)


def test_a_job_of_several_machines_is_not_warned_of_the_cores_of_this_one(job):
    config = load_config([job, "--nnodes", "2", "--nproc-per-node", "8"], REGISTRY)
    report = examine(config, 16, machine=Machine(10**12, num_cores=2))
    assert report.errors == () and report.warnings == ()


@pytest.mark.parametrize("quota, cores", [("150000 100000", 2), ("20000 100000", 1), ("max 100000", 9)])
def test_a_containers_share_of_the_cores_counts(quota, cores, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr("megarl.checks.machine._CGROUP_CPUS", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(9)))
    assert this_machine().num_cores == cores

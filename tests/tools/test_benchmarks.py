"""The benchmarks under tools/benchmarks refuse numbers that are not megarl's, or of something else than they
say.

pytest tests/tools/test_benchmarks.py"""

from __future__ import annotations

import gc
import importlib
import json
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tools" / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # Benchmarks set or remove these when they are imported.
    # Benchmarks set or remove these when they are imported.
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    for variable in ("WORLD_SIZE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(variable, "1")
    for variable in ("WORLD_SIZE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(variable, "1")
    return importlib.import_module


# ------------------------------------------------------------------ bench_kernels.py


def broken() -> dict[str, torch.Tensor]:
    raise RuntimeError("no kernel image is available")


def doubled(add: float, dtype: torch.dtype = torch.float32):
    return lambda: {"out": torch.full((4,), 2.0 + add, dtype=dtype)}


@pytest.fixture
def kernels(load, monkeypatch):
    """Run bench_kernels.py with one case of these contenders, each a function and whether it is megarl's, and
    return its exit code."""
    bench, turns = load("bench_kernels"), load("turns")
    monkeypatch.setattr(bench.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(bench.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(bench.torch, "set_num_threads", lambda _: None)

    def run(*contenders):
        found = [turns.Contender(f"{i}", function, is_megarl=ours) for i, (function, ours) in contenders]
        case = turns.Case("planted", found, lambda: {"out": torch.full((4,), 2.0, dtype=torch.float64)})
        good = turns.Case("good", [turns.Contender("good", doubled(0), is_megarl=True)], case.float64)
        monkeypatch.setattr(bench, "CASES", {"planted": lambda _: case, "good": lambda _: good})
        monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--repeats", "1"])
        return bench.main()

    return lambda *contenders: run(*enumerate(contenders))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (broken, "FAILED planted: 1: RuntimeError: no kernel image is available"),
        (doubled(float("nan")), "FAILED planted: 1: the error of out is nan; it must be at most 2.0e-04"),
        (doubled(0.01), "FAILED planted: 1: the error of out is 5.0e-03; it must be at most 2.0e-04"),
        (doubled(0.03, torch.bfloat16), "FAILED planted: 1: the error of out is 1.6e-02"),
    ],
    ids=["raises", "nan", "wrong", "wrong_bf16"],
)
def test_a_kernel_of_megarl_that_fails_fails_the_benchmark(kernels, capsys, function, says):
    assert kernels((doubled(0), True), (function, True)) == 1
    printed = capsys.readouterr().out
    assert says in printed
    assert "\ngood\n" in printed, "the other cases run too"


def test_a_kernel_of_others_may_fail(kernels, capsys):
    others = [(broken, False), (doubled(float("nan")), False), (lambda: {}, False)]
    assert kernels((doubled(0), True), (doubled(0.01, torch.bfloat16), True), *others) == 0
    assert "missing: RuntimeError: no kernel image is available" in capsys.readouterr().out


def test_all_kernels_of_megarl_are_known_as_its_own(load):
    """Of each case the contenders that are neither others' software nor floors, by name."""
    cases = load("bench_kernels").CASES
    ours = {name: [c.name for c in make(True).contenders if c.is_megarl] for name, make in cases.items()}
    head, losses = ["fused_linear_policy_loss", "linear_log_probs"], ours.pop("head_losses")
    assert ours == {
        "head": head,
        "head_entropy": head,
        "head_half": head,
        "log_probs": ["vocab_parallel_log_probs"],
        "policy_loss": ["policy_loss"],
        "gae": ["gae"],
    }
    assert losses == [c.name for c in cases["head_losses"](True).contenders]


# ------------------------------------------------------------------ bench_step.py


def test_a_model_is_gone_before_the_next_is_measured(load, monkeypatch):
    bench = load("bench_step")
    alive: list[weakref.ref] = []

    class Model:
        def __init__(self) -> None:
            self.itself = self  # as Megatron's modules and their hooks refer to each other

    def measure(name, arguments):
        assert [model() for model in alive] == [None] * len(alive), "an earlier model is still there"
        alive.append(weakref.ref(Model()))
        part = {"flops": 1.0, "seconds": 1.0, "tokens_per_s": 1.0}
        return {"log_probs": dict(part), "update": dict(part), "peak_bytes": 0}

    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(bench.dist, name, lambda *_, **__: None)
    arguments = SimpleNamespace(models=["0.5b", "1.5b"], fp32=True, json=None)
    monkeypatch.setattr(bench, "create_groups", lambda _: None)
    monkeypatch.setattr(bench, "parse_arguments", lambda: arguments)
    monkeypatch.setattr(bench, "matrix_rate", lambda _: 1.0)
    monkeypatch.setattr(bench, "measure", measure)
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        assert bench.main() == 0
    finally:
        if is_enabled:
            gc.enable()
    assert len(alive) == 2


# ------------------------------------------------------------------ bench_jobs.py


def write_rollouts(folder: Path, step: int, rewards: list[list[float | None]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"row": row, "reward": reward} for row, group in enumerate(rewards) for reward in group]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"step_{step:06d}.jsonl").write_text(lines)


def steps_of(bench, *steps: int) -> list[dict]:
    return [{"step": step} | dict.fromkeys(bench.COLUMNS.values(), float(step)) for step in steps]


def test_a_job_reports_how_much_rewards_differ_within_groups(load, tmp_path):
    bench = load("bench_jobs")
    write_rollouts(tmp_path / "rollouts", 3, [[0.0, 2.0], [1.0, 1.0]])  # deviations sqrt(2) and 0
    write_rollouts(tmp_path / "rollouts", 4, [[5.0, None], [0.0, 4.0]])  # none, and sqrt(8)
    found = bench.summary(tmp_path, steps_of(bench, 3, 4))
    assert found["reward_std"] == pytest.approx((2**0.5 + 0 + 8**0.5) / 3, abs=1e-6)
    assert found["update_s"] == 3.5
    assert "missing" not in found


def test_a_job_whose_groups_have_equal_rewards_has_no_times(load, tmp_path):
    bench = load("bench_jobs")
    write_rollouts(tmp_path / "rollouts", 3, [[0.0, 0.0], [1.0, 1.0]])
    found = bench.summary(tmp_path, steps_of(bench, 3))
    assert found.keys() == {"failed"}
    assert "reward_std is 0. Rewards must differ within groups" in found["failed"]


def test_a_metric_that_a_job_does_not_report_is_named(load, tmp_path):
    bench = load("bench_jobs")
    write_rollouts(tmp_path / "rollouts", 3, [[0.0, 2.0]])
    write_rollouts(tmp_path / "rollouts", 4, [[0.0, 2.0]])
    rows = steps_of(bench, 3, 4)
    del rows[0]["sync/bytes"], rows[1]["memory/peak_bytes"]
    found = bench.summary(tmp_path, rows)
    assert found["missing"] == ["memory/peak_bytes", "sync/bytes"]
    assert found["step_s"] == 3.5


def test_rewards_that_a_job_has_not_logged_are_named(load, tmp_path):
    bench = load("bench_jobs")
    found = bench.summary(tmp_path, steps_of(bench, 3, 4))
    assert found["missing"] == ["reward_std"] and "reward_std" not in found


def command_of(bench, monkeypatch, job: str, folder: Path, model: Path, *, small: bool) -> list[str]:
    """Return the command that bench_jobs.py starts for a job."""
    started = []
    monkeypatch.setattr(bench.subprocess, "call", lambda command, **_: started.append(command) or 1)
    bench.run(job, folder, model, SimpleNamespace(train_iters=3, small=small, timeout_s=1), [])
    return [str(word) for word in started[0]]


@pytest.mark.parametrize("job", ["grpo", "separate_process", "ppo"])
def test_a_job_fits_80_gb_and_rewards_by_the_text(load, tmp_path, monkeypatch, job):
    from megarl.cli import main
    from sums.files import make_sums

    bench = load("bench_jobs")
    assert job in bench.JOBS
    make_sums(tmp_path / "data", seed=0)
    model = tmp_path / "model"
    load("make_random_model").write_model_folder(model, weights=False, seed=0)
    command = command_of(bench, monkeypatch, job, tmp_path, model, small=False)
    assert command[command.index("--reward-function") + 1] == f"{BENCHMARKS / 'permuted_reward.py'}:by_text"
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("RANK", raising=False)  # of `load`
    flags = command[command.index("train") + 1 :]
    assert main(["check", *flags, "--random-init", "--gpu-memory", "80"]) == 0


def test_rewards_by_the_text_differ(load):
    by_text = load("permuted_reward").by_text
    texts = [f"{number}" for number in range(100)]
    values = [by_text("sums", text, None, {}) for text in texts]
    assert values == [by_text("other", text, "1", {"index": 1}) for text in texts]
    assert len({*values}) == 100 and all(0 <= value < 1 for value in values)


def test_the_jobs_fit_the_time_that_the_gpu_script_gives_them(load):
    bench = load("bench_jobs")
    limit = re.search(r"run bench_jobs (\d+) ", (ROOT / "tools" / "gpu_session.sh").read_text())
    to_make_the_model_s = 40
    assert len(bench.JOBS) * bench.JOB_TIMEOUT_S + to_make_the_model_s <= int(limit[1])


# ------------------------------------------------------------------ others


def test_copies_of_pytorch_are_not_timed_as_megarls(load, monkeypatch):
    from megarl.reshard import copier

    bench = load("bench_reshard")
    built = SimpleNamespace(build_info="for CUDA 13.0: 90")
    monkeypatch.setattr(copier, "extension_for", lambda device: built if device == "cuda" else None)
    assert bench.extension_build("cuda") == "for CUDA 13.0: 90"
    monkeypatch.setattr(copier, "extension_for", lambda _: None)
    monkeypatch.setattr(bench, "run_phases", lambda _: pytest.fail("it measures"))
    monkeypatch.setattr(sys, "argv", ["bench_reshard.py", "--device", "cuda"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which main sets
    with pytest.raises(SystemExit, match=r"--device cuda: .* PyTorch copies. Reinstall with MEGARL_CUDA=ON"):
        bench.main()


def test_the_commit_is_that_of_the_environment_or_of_the_checkout(load, monkeypatch):
    commit = load("checkout").commit
    monkeypatch.setenv("MEGARL_COMMIT", "0123abcd")
    assert commit() == "0123abcd"
    monkeypatch.delenv("MEGARL_COMMIT")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    assert commit().removesuffix("-dirty") == (head.stdout.strip() or "unknown")
    for name in ("bench_step", "bench_kernels"):
        assert load(name).commit is commit


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("test.jsonl", r"--data \(.*data\): has no test.jsonl. Try runs/quickstart/data"),
        ("train.jsonl", r"--data \(.*data\): has no train.jsonl. Try runs/quickstart/data"),
        (None, r"--out \(.*out\): exists already. Name a new folder"),
    ],
    ids=["test_data", "train_data", "out"],
)
def test_commits_are_compared_with_all_data_and_a_new_folder(
    load, tmp_path, monkeypatch, capsys, missing, says
):
    bench = load("bench_commits")
    for name in ("data/train.jsonl", "data/test.jsonl", "checkout/.venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if missing:
        (tmp_path / "data" / missing).unlink()
    else:
        (tmp_path / "out").mkdir()
    folders = {
        flag: str(tmp_path / flag.strip("-")) for flag in ("--data", "--out", "--json", "--checkpoint")
    }
    words = [word for pair in folders.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["bench_commits.py", str(tmp_path / "checkout"), *words])
    monkeypatch.setattr(bench, "train", lambda *_: pytest.fail("it trains"))
    with pytest.raises(SystemExit):
        bench.main()
    assert re.search(says, capsys.readouterr().err)

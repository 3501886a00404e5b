"""Whole jobs with engines that go on from a checkpoint: in the same layout bit for bit as if nothing had
been, in another one alike.

pytest tests/e2e/test_resume.py                 one job beside one that other tests have run, 20 s
pytest tests/e2e/test_resume.py -m nightly         PPO, bf16, adapters, two actors, experts, other layouts"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megarl.checkpoint.load import Checkpoint
from tests.e2e.jobs import Job, train
from tests.e2e.test_experts import EXPERTS

VARYING = ("time/", "time_2/", "throughput/", "memory/", "memory_2/")
TP2 = ("--tensor-model-parallel-size", "2", "--rollout-tensor-parallel-size", "2")
PPO = (
    "--algorithm",
    "ppo",
    "--kl-mode",
    "reward",
    "--kl-coef",
    "0.05",
    "--kl-controller",
    "adaptive",
    "--kl-target",
    "0.5",
    "--kl-horizon",
    "100",
    "--critic-lr",
    "1e-2",
    "--critic-tensor-model-parallel-size",
    "2",
)
TWO = (
    "--algorithm",
    "ppo",
    "--kl-mode",
    "reward",
    "--kl-coef",
    "0.05",
    "--num-actors",
    "2",
    "--actor-ranks",
    "0",
    "--rollout-ranks",
    "0",
    "--critic-ranks",
    "0",
    "--actor-2-ranks",
    "1",
    "--rollout-2-ranks",
    "1",
    "--critic-2-ranks",
    "1",
    "--actor-2-seed",
    "3",
)

SAME = {
    "grpo": ("--lr-decay-style", "cosine", "--lr-warmup-iters", "1"),
    "ppo": PPO,
    "bf16": ("--bf16", "--gate-mean-abs", "0.1", "--lr", "1e-4"),
    "lora": ("--lora-rank", "4", "--kl-mode", "loss", "--kl-coef", "0.05"),
    "two_actors": TWO,
    "tp2": TP2,
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "offload": ("--offload", "parameters", "gradients", "optimizer", "--no-reshard-alias"),
    "replicated_optimizer": ("--no-use-distributed-optimizer",),
    "one_rank_each": ("--actor-ranks", "0", "--rollout-ranks", "1"),
    "inline": ("--nproc-per-node", "1", "--executor", "inline"),
}
OTHER = {  # written by -> read by
    "tp2_to_dp2": (TP2, ()),
    "dp2_to_pp2": ((), ("--pipeline-model-parallel-size", "2")),
    "dp2_to_one": ((), ("--nproc-per-node", "1")),
}


def rows(job: Job, after: int = 0) -> list[dict]:
    return [
        {name: value for name, value in row.items() if not name.startswith(VARYING)}
        for row in job.metrics
        if row["step"] > after
    ]


def exported(job: Job) -> dict[str, bytes]:
    return {
        str(path.relative_to(job.folder)): path.read_bytes() for path in job.folder.glob("hf*/*.safetensors")
    }


def halves(
    data: Path, folder: Path, *flags: str, resumed: tuple[str, ...] | None = None, steps: int = 4
) -> tuple[Job, Job]:
    """A job of so many steps with a checkpoint at the half, and one that begins there, in another folder and
    maybe layout."""
    common = ("--train-iters", str(steps))
    whole = train(data, folder / "whole", *common, "--save-interval", str(steps // 2), *flags, timeout=800)
    assert whole.returncode == 0, whole.output
    half = train(
        data,
        folder / "half",
        *common,
        "--load",
        str(folder / "whole" / "checkpoints" / f"step_{steps // 2:06d}"),
        *(flags if resumed is None else resumed),
        timeout=800,
    )
    assert half.returncode == 0, half.output
    assert f"continues after step {steps // 2}: " in half.output
    return whole, half


def check_equal(whole: Job, half: Job, after: int = 2) -> None:
    assert rows(half) == rows(whole, after) != []
    assert exported(half) == exported(whole) != {}


def test_a_resumed_job_makes_the_same_steps(layout_job, sums_data, tmp_path):
    """GRPO on two ranks, in-process engines; with a held-out evaluation, which is not repeated at the start.
    fp32: to the last bit."""
    whole = layout_job("dp2_to_tp1")
    evaluate = (
        "--eval-data",
        str(sums_data / "test.parquet"),
        "--eval-interval",
        "3",
        "--eval-num-prompts",
        "20",
    )
    half = train(
        sums_data, tmp_path / "half", *evaluate, "--load", str(whole.folder / "checkpoints" / "step_000002")
    )
    assert half.returncode == 0, half.output
    check_equal(whole, half)
    assert (
        [row["step"] for row in half.metrics] == [3]
        and "eval/reward" in half.metrics[0]
        and half.metrics[0]["sync/version"] == 3
    )
    # both replicas hold all weights, and each optimizer rank half of the moments: every element is written
    # once
    checkpoint = Checkpoint(whole.folder / "checkpoints" / "step_000003" / "actor")
    parameters = sum(
        box.area for t in checkpoint.tensors("weights").values() for box in [p.box for p in t.parts]
    )
    assert sum(size for size, _ in checkpoint.manifest.files.values()) < 1.1 * 3 * 4 * parameters


@pytest.mark.nightly
def test_ten_steps_are_five_and_five(sums_data, tmp_path):
    """In one run folder, the first job told to make five only."""
    whole = train(sums_data, tmp_path / "whole", "--train-iters", "10")
    first = train(sums_data, tmp_path / "parts", "--train-iters", "5", "--save-interval", "5")
    second = train(
        sums_data,
        tmp_path / "parts",
        "--train-iters",
        "10",
        "--save-interval",
        "5",
        "--load",
        str(tmp_path / "parts"),
    )
    assert (whole.returncode, first.returncode, second.returncode) == (0, 0, 0), (
        whole.output + first.output + second.output
    )
    check_equal(whole, second, after=0)
    assert [row["step"] for row in second.metrics] == [*range(1, 11)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAME)
def test_so_do_other_jobs(sums_data, tmp_path, name):
    whole, half = halves(sums_data, tmp_path, *SAME[name])
    check_equal(whole, half)


@pytest.mark.nightly
def test_experts_too(sums_data, tmp_path):
    shutil.copytree(sums_data / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | EXPERTS))
    flags = ("--model", str(tmp_path / "model"), "--random-init", "--rollout-tensor-parallel-size", "2")
    whole, half = halves(sums_data, tmp_path, *flags, "--expert-model-parallel-size", "2")
    check_equal(whole, half)
    other = train(
        sums_data,
        tmp_path / "other",
        *flags,
        "--train-iters",
        "4",
        "--load",
        str(tmp_path / "whole" / "checkpoints" / "step_000002"),
    )
    assert other.returncode == 0, other.output
    check_alike(whole, other)


@pytest.mark.nightly
def test_fine_tuning_on_two_ranks_too(sums_data, tmp_path):
    flags = (
        "--algorithm",
        "sft",
        "--train-data",
        str(sums_data / "sft_worked.jsonl"),
        "--max-response-length",
        "48",
    )
    whole, half = halves(sums_data, tmp_path, *flags)
    check_equal(whole, half)


def check_alike(whole: Job, half: Job) -> None:
    """The first step after: the samples, so the rewards, and the loss. fp32, sums in another order: losses
    around 1e-2 differ by up to 1e-8 where the weights are the same; a lost moment shows in the second
    step."""
    for name in ("reward/mean", "response/length_mean"):
        assert [row[name] for row in rows(half)] == [row[name] for row in rows(whole, 2)]
    assert rows(half)[0]["policy/loss"] == pytest.approx(rows(whole, 2)[0]["policy/loss"], abs=1e-6)
    assert rows(half)[0]["policy/grad_norm"] == pytest.approx(rows(whole, 2)[0]["policy/grad_norm"], rel=1e-4)
    assert rows(half)[1]["policy/loss"] == pytest.approx(rows(whole, 2)[1]["policy/loss"], abs=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHER)
def test_another_layout_goes_on_alike(sums_data, tmp_path, name):
    writer, reader = OTHER[name]
    check_alike(*halves(sums_data, tmp_path, *writer, resumed=reader))

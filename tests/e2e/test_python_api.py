"""Loops of one's own with real engines: the example, every call by hand, inline, a failing rank, Ctrl-C.

pytest tests/e2e/test_python_api.py"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launch import preloaded_python
from tests.e2e.jobs import COMMON, replace_flags
from tests.e2e.test_cli_jobs import processes, wait_until

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "own_loop.py"
PPO = [
    "--algorithm",
    "ppo",
    "--train-iters",
    "2",
    "--kl-mode",
    "reward",
    "--kl-coef",
    "0.05",
    "--save",
    "run",
]


@contextmanager
def started(
    script: Path, *arguments: str, data: Path, folder: Path
) -> Iterator[tuple[subprocess.Popen, str]]:
    """The user's process and the mark of all processes that come of it, none of which may be left at the
    end."""
    name = [arguments[0]] if not arguments[0].startswith("--") else []
    flags = replace_flags(
        [*COMMON, "--model", str(data / "model"), "--train-data", str(data / "train.jsonl"), "--save", "run"],
        list(arguments[len(name) :]),
    )
    mark = f"MEGARL_TEST_JOB={folder.name}-{os.getpid()}"
    with open(folder / "out", "w") as out:
        process = subprocess.Popen(
            [preloaded_python(), str(script), *name, *flags],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=dict([*os.environ.items(), mark.split("=")]),
            start_new_session=True,
        )
    try:
        yield process, mark
        wait_until(lambda: not processes(mark), 10)
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)


def shared_memory_of(pids: list[int]) -> set[str]:
    """Names in /dev/shm that these processes have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {name for name in os.listdir("/dev/shm") if f"/dev/shm/{name}" in maps}


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_the_example_runs_with_its_own_reward_and_stop(sums_data, tmp_path):
    flags = (
        "--train-iters",
        "5",
        "--eval-data",
        str(sums_data / "test.parquet"),
        "--eval-interval",
        "2",
        "--eval-num-prompts",
        "4",
        "--num-rollouts-to-log",
        "-1",
    )
    script = tmp_path / "own_loop.py"
    script.write_text(
        EXAMPLE.read_text().replace(
            "GOOD_ENOUGH, PRICE_OF_A_TOKEN = 0.9", "GOOD_ENOUGH, PRICE_OF_A_TOKEN = 0.0"
        )
    )
    with started(script, *flags, data=sums_data, folder=tmp_path) as (process, _):
        assert process.wait(150) == 0, (tmp_path / "out").read_text()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2] and "eval/reward" in rows(tmp_path)[
        1
    ]  # any accuracy is enough: it stopped
    for row in rows(tmp_path):
        samples = [
            json.loads(line)
            for line in (tmp_path / "run" / "rollouts" / f"step_{row['step']:06d}.jsonl")
            .read_text()
            .splitlines()
        ]
        assert len(samples) == 16
        expected = sum(s["rule_reward"] - 0.002 * s["response_length"] for s in samples) / len(samples)
        assert row["reward/mean"] == pytest.approx(expected, abs=1e-6)
    told = (tmp_path / "out").read_text().splitlines()
    assert [line.split(":")[0] for line in told] == ["step 1", "step 2"], told
    before, after = (
        load_file(f / "model.safetensors") for f in (sums_data / "model", tmp_path / "run" / "hf")
    )
    assert all((after[name] - weight).abs().max() > 0 for name, weight in before.items())


@pytest.mark.nightly
def test_the_example_with_asynchronous_rollouts_asks_failed_prompts_again(sums_data, tmp_path):
    flags = ("--train-iters", "4", "--staleness", "1", "--nproc-per-node", "1", "--num-rollouts-to-log", "-1")
    script = EXAMPLE.with_name("retry_loop.py")
    with started(script, *flags, data=sums_data, folder=tmp_path) as (process, _):
        assert process.wait(150) == 0, (tmp_path / "out").read_text()
    told = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in told] == ["step 1", "step 2", "step 3", "step 4"]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert max(row["staleness/max"] for row in rows(tmp_path)) <= 1


@pytest.mark.nightly
def test_by_hand_by_flow_and_inline_are_the_same_steps_and_a_failing_rank_is_told(sums_data, tmp_path):
    """Critic on rank 1, actor on rank 0, against one process without ranks: sums in another order, as in
    test_grpo_job.py."""
    by_hand, inline = tmp_path / "by_hand", tmp_path / "inline"
    for folder in (by_hand, inline):
        folder.mkdir()
    with started(
        HERE / "own_loops.py",
        "by_hand",
        *PPO,
        "--actor-ranks",
        "0",
        "--critic-ranks",
        "1",
        data=sums_data,
        folder=by_hand,
    ) as (process, _):
        assert process.wait(150) == 1
    told, seen = (by_hand / "out").read_text(), json.loads((by_hand / "by_hand.json").read_text())
    assert "batch (RolloutBatch(step 1, " in seen["old_batch"] and seen["no_role"].startswith(
        "role (nobody): this job has actor, "
    )
    assert seen["remote"] == ["critic", 1, 2]
    assert (
        "RemoteError: [critic rank 1] no_such_method failed at step 2: AttributeError: 'CriticRole' "
        "object has no" in told
    )
    assert "score.weight" in load_file(by_hand / "run" / "critic" / "model.safetensors")
    alone = ("--executor", "inline", "--nproc-per-node", "1")
    with started(HERE / "own_loops.py", "plain", *PPO, *alone, data=sums_data, folder=inline) as (process, _):
        assert process.wait(150) == 0, (inline / "out").read_text()
    expected = json.loads((inline / "plain.json").read_text())["steps"]
    assert len(expected) == len(seen["steps"]) == 2
    for here, there in zip(seen["steps"], expected, strict=True):
        for key in ("reward/mean", "response/length_mean", "batch/tokens", "sync/version"):
            assert here[key] == there[key], key
        for key in ("policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm", "kl/per_response"):
            assert here[key] == pytest.approx(there[key], rel=1e-3, abs=1e-6), key
        assert here["mismatch/max_abs"] <= 1e-4
    assert [row["step"] for row in rows(by_hand)] == [1, 2]


@pytest.mark.nightly
def test_trainers_beside_each_other_do_what_each_does_alone(sums_data, tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    for name, folder in (("several", together), ("plain", alone)):
        folder.mkdir()
        with started(
            HERE / "own_loops.py", name, *PPO, "--nproc-per-node", "1", data=sums_data, folder=folder
        ) as (process, _):
            assert process.wait(200) == 0, (folder / "out").read_text()
    both, expected = (
        json.loads((folder / f"{name}.json").read_text())
        for name, folder in (("several", together), ("plain", alone))
    )
    names = [
        name
        for name in expected["steps"][0]
        if name.split("/")[0] in ("policy", "critic", "reward", "response", "kl", "advantage")
    ]
    assert len(names) > 20 and len(both["other"]) == 2
    for step, there in zip(both["steps"], expected["steps"], strict=True):
        assert {name: step[name] for name in names} == {name: there[name] for name in names}
    assert both["steps"][0]["policy/loss"] != both["other"][0]["policy/loss"]


@pytest.mark.nightly
def test_ctrl_c_ends_a_loop_and_all_its_ranks(sums_data, tmp_path):
    """With engines over both ranks, which share memory."""
    with started(
        HERE / "own_loops.py",
        "waits",
        "--train-iters",
        "100000",
        "--rollout-tensor-parallel-size",
        "2",
        data=sums_data,
        folder=tmp_path,
    ) as (process, mark):
        wait_until(lambda: (tmp_path / "ready").exists() or process.poll() is not None, 150)
        shared = shared_memory_of(processes(mark))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT, (tmp_path / "out").read_text()
        assert not processes(mark)  # not even for a moment: the with block ends when they have
        assert shared and not shared & set(os.listdir("/dev/shm"))
    assert (tmp_path / "out").read_text().rstrip().endswith("KeyboardInterrupt")
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, len(rows(tmp_path)) + 1))

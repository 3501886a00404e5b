"""Engines in processes of their own against transformers, fed from the shared memory of two trainer
processes, with real vLLM.

    pytest tests/rollout/test_out_of_process.py

run_out_of_process.py runs once with a tied Qwen2 and vLLM TP=1, and with planted faults; once with an untied
Qwen3 and vLLM TP=2, and ends by a crash. Log-probs in fp32 agree to 2e-5: which requests share a batch moves
them, and 1.001e-5 was seen. A wrong weight shows as 0.1 or more."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.rollout.engine_memory import sweep_shared_memory
from megarl.rollout.out_of_process import OutOfProcessEngine
from megarl.rollout.patience import Patience
from megarl.rollout.processes import EngineHangs
from tests.launch import preloaded_python

FP32_LIMIT = 2e-5
TIMEOUT_S = 300  # 25 s each on two free cores
HERE = Path(__file__).parent
SHM = Path("/dev/shm")


def run(folder: Path, family: str, tp: int, end: str) -> dict:
    """Reports of both ranks, exit codes, and what is in /dev/shm that was not there before and is not another
    job's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = {path.name for path in SHM.iterdir()}
    arguments = [str(folder), "RANK", str(port), family, str(tp), end]
    logs = [
        folder / f"{family}-{tp}-{rank}.log" for rank in (0, 1)
    ]  # not pipes: what outlives a rank would keep them open
    ranks = [
        subprocess.Popen(
            [
                preloaded_python(),
                str(HERE / "run_out_of_process.py"),
                *(str(rank) if a == "RANK" else a for a in arguments),
            ],
            stderr=log.open("w"),
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for rank in ranks:
            rank.wait(TIMEOUT_S)
    finally:
        for rank in ranks:
            rank.kill()
    errors = [log.read_text() for log in logs]
    reports = {}
    for rank, text in enumerate(errors):
        path = folder / f"{family}-{tp}-{rank}.json"
        assert path.exists(), text
        reports[rank] = json.loads(path.read_text())
    return reports | {
        "exit_codes": [rank.returncode for rank in ranks],
        "stderr": errors,
        "shm_before": before,
    }


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("faults"), "qwen2", 1, "faults")


@pytest.fixture(scope="module")
def crash(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("crash"), "qwen3", 2, "crash")


def check_layouts(report: dict, num_bytes: int) -> None:
    for name, transports in (
        ("TP1", ["shared-memory"]),
        ("TP2", ["shared-memory"]),
        ("messages", ["messages"]),
    ):
        assert max(report[name]) <= FP32_LIMIT, (name, report[name])
        by, version, vllm_version, written = report[f"{name} by"]
        assert by == transports and str(version) == vllm_version and written == num_bytes
    assert (
        "--reshard-transport (messages): weights of rank 0 cannot get to the engine of rank 0 this way"
        in report["impossible"]
    )
    assert "For this pair works: shared-memory" in report["impossible"]


def test_log_probs_after_every_sync_are_those_of_transformers(faults):
    """Qwen2, tied, biases, vLLM TP=1, from Megatron TP=1 and TP=2."""
    hidden, ffn, vocab, heads, groups, head = 128, 96, 130, 4, 2, 32
    layer = (hidden + 1) * head * (heads + 2 * groups) + heads * head * hidden + 3 * hidden * ffn + 2 * hidden
    check_layouts(faults[0], 4 * (2 * layer + vocab * hidden + hidden))


@pytest.mark.nightly
def test_two_ranks_of_vllm_from_one_or_two_of_megatron(crash):
    """Qwen3, untied, norms of queries and keys. Replicated norms are written on both ranks."""
    hidden, ffn, vocab, heads, groups, head = 128, 96, 150, 4, 2, 32
    split = hidden * head * (heads + 2 * groups) + heads * head * hidden + 3 * hidden * ffn
    norms = 2 * hidden + 2 * head
    check_layouts(crash[0], 4 * (2 * (split + 2 * norms) + 2 * vocab * hidden + 2 * hidden))


@pytest.mark.nightly
@pytest.mark.parametrize("family, tp", [("qwen2", 2), ("qwen3", 1), ("llama", 2)])
def test_the_other_layouts(tmp_path, family, tp):
    report = run(tmp_path, family, tp, "clean")[0]
    assert max(gap for name in ("TP1", "TP2", "messages") for gap in report[name]) <= FP32_LIMIT


def test_a_sync_works_again_after_one_that_could_not(faults):
    error, gap = faults[0]["after an error"]
    assert error == "" and gap <= FP32_LIMIT


def test_generation_goes_on_with_the_old_weights_while_the_new_ones_are_written(faults):
    assert faults[0]["same while copying"]  # tokens and log-probs, bit for bit, while the copy sleeps
    assert faults[0]["gap of the slow one"] <= FP32_LIMIT


def test_a_flipped_bit_is_named_on_every_rank_and_changes_nothing(faults):
    for rank in (0, 1):
        assert "[rank 0] model.embed_tokens.weight[0:" in faults[rank]["flipped"], faults[rank]["flipped"]
        assert "is not what rank 0 sent from embedding.word_embeddings.weight" in faults[rank]["flipped"]
    assert faults[0]["same after the flip"]
    error, gap = faults[0]["repeated"]
    assert error == "" and gap <= FP32_LIMIT


def test_a_late_rank_is_named_and_changes_nothing(faults):
    assert "[rank 1] did not take part within --reshard-timeout-s (1.5)" in faults[0]["late"]
    assert faults[0]["same after the late one"]
    error, gap = faults[0]["in time again"]
    assert error == "" and gap <= FP32_LIMIT


def test_a_killed_engine_is_named_on_every_rank(faults):
    for rank in (0, 1):
        assert "[rank 0] the process of vLLM's engine died (killed by SIGKILL)" in faults[rank]["killed"], (
            faults[rank]
        )
    assert "died" in faults[0]["generate after the kill"]
    assert faults["exit_codes"] == [0, 0], faults["stderr"]


@pytest.mark.nightly
def test_nothing_stays_in_shared_memory(faults, crash):
    """After a killed engine, and after ranks that left without a word while the engine was up."""
    assert crash["exit_codes"] == [7, 7]
    deadline = time.monotonic() + 15
    pids = [pid for report in (faults, crash) for rank in (0, 1) for pid in report[rank]["children"]]
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.2)
    alive = {
        pid: (Path(f"/proc/{pid}/cmdline").read_text(), Path(f"/proc/{pid}/status").read_text()[:200])
        for pid in pids
        if Path(f"/proc/{pid}").exists()
    }
    assert len(crash[0]["children"]) >= 3 and not alive, alive
    assert sweep_shared_memory() is not None  # what the next start does
    left = {path.name for path in SHM.iterdir()} - faults["shm_before"]
    assert [
        name
        for name in left
        if name.startswith(tuple(f"megarl-{r[rank]['pid']}-" for r in (faults, crash) for rank in (0, 1)))
    ] == []
    assert [name for name in left if name.startswith(("psm_", "torch_", "sem."))] == []


class Stopped:
    """An engine that answers no call, and knows how many seconds its rank has waited."""

    def __init__(self) -> None:
        self.patience, self.waited_s = Patience(is_limited=True), 0.0

    def wait_for_weights(self, timeout_s: float) -> list:
        self.waited_s += timeout_s + self.patience.limit_s
        raise EngineHangs("no answer")

    def pull_weights(self, orders: list, timeout_s: float) -> None:
        self.wait_for_weights(timeout_s)

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("longest_step_s, left_s", [(None, 600.0), (0.1, 600.0), (0.1, 20.0), (20.0, 450.0)])
def test_an_engine_that_stops_in_a_copy_leaves_before_the_sync_is_over(longest_step_s, left_s):
    """Its rank votes in time, so the other engines get the version."""
    engine = OutOfProcessEngine.__new__(OutOfProcessEngine)
    engine.inference, engine.failure, engine.is_pinned, engine.may_leave = Stopped(), None, False, True
    engine.ranks, engine._is_new, engine._pulls = (), False, {}
    engine.options = SimpleNamespace(reshard_timeout_s=left_s)
    if longest_step_s is not None:
        engine.inference.patience.note_step(longest_step_s)
    assert engine.verify(left_s) is None and engine.inference.waited_s <= left_s
    assert isinstance(engine.failure, EngineHangs)
    engine.inference.waited_s, engine.failure = 0.0, None
    engine.begin(1, {}, {}, lambda: None)  # with one buffer the copy is a part of the call
    assert engine.inference.waited_s <= left_s and isinstance(engine.failure, EngineHangs)


def test_a_copy_may_use_all_of_the_time_if_the_job_ends_with_its_engine():
    engine = OutOfProcessEngine.__new__(OutOfProcessEngine)
    engine.inference, engine.may_leave = Stopped(), False
    assert engine._copy_limit_s(600.0) == 600.0
    engine.may_leave = True
    assert engine._copy_limit_s(600.0) == 540.0 and engine._copy_limit_s(50.0) == 25.0

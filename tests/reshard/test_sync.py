"""A weight sync between two ranks, against the model that the shards were cut from; and what each kind of
failure leaves.

pytest tests/reshard/test_sync.py"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from cuts import hf_model, make_shape

from megarl.config.schema import ReshardConfig
from megarl.reshard.atlas import whole
from megarl.reshard.plan import make_plan
from megarl.reshard.sync import SyncError, WeightSync
from megarl.reshard.transfer import Transfer
from tests.launch import run_ranks

SHAPE = make_shape("qwen3", layers=2, vocab=61)
PULLED = {"cpu": "shared-memory", "cuda": "cuda-ipc"}
"""Device of the weights -> the transport that `auto` chooses between two processes."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder, script = tmp_path_factory.mktemp("sync"), Path(__file__).with_name("run_sync.py")
    before = set(os.listdir("/dev/shm"))
    run_ranks(2, lambda rank: [script, folder, rank], timeout=120)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")}
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name, dtype", [("auto", torch.float32), ("messages", torch.bfloat16)])
def test_both_engines_have_every_version_bit_for_bit(ranks, name, dtype):
    for rank, out in enumerate(ranks):
        others = PULLED[out["device"]] if name == "auto" else name
        assert set(out[name]["transports"].items()) == {
            ((rank, rank), "direct"),
            ((rank, 1 - rank), others),
            ((1 - rank, rank), others),
        }
        for version in (1, 2):
            error, committed, got = out[name][version]
            assert error == "" and committed == version
            full = hf_model(SHAPE, seed=version)
            for hf_name, local in (
                ("model.embed_tokens.weight", slice(0, 61)),
                ("lm_head.weight", slice(0, 61)),
                ("model.norm.weight", slice(None)),
                ("model.layers.1.self_attn.o_proj.weight", slice(None)),
                ("model.layers.0.mlp.down_proj.weight", slice(None)),
            ):
                assert torch.equal(
                    got[hf_name][local], full[hf_name].view(got[hf_name][local].shape).to(dtype)
                ), hf_name
            layer = "model.layers.0.self_attn."
            qkv = torch.cat([full[f"{layer}{p}_proj.weight"] for p in "qkv"])
            assert torch.equal(got[f"{layer}qkv_proj.weight"], qkv.to(dtype))


def test_weights_that_moved_are_found_again(ranks):
    for out in ranks:
        error, embedding = out["moved"]
        assert error == "" and torch.equal(
            embedding, hf_model(SHAPE, seed=2)["model.embed_tokens.weight"] + 1
        )


def test_what_goes_wrong_on_one_rank_is_told_on_all_and_committed_on_none(ranks):
    for out in ranks:
        assert (
            "[rank 1] model.layers.1.mlp.down_proj.weight[0:" in out["flipped"][0]
            and "sampled digest" in out["flipped"][0]
        )
        assert out["again"] == ("", 4)
        assert out["failed"] == ("[rank 0] weights of version 5: OSError: no more memory", None)
        assert (
            out["other version"][0].startswith("[rank 0] weights of version 6: rank 1 has version 7")
            and out["other version"][1] is None
        )
        (other,) = {*PULLED.values()} - {PULLED[out["device"]]}
        assert (
            f"[rank 0] --reshard-transport ({other}): weights of rank 0 cannot get to the engine of rank 1"
            in out["impossible"]
        )
    assert all(out["flipped"][1] is None for out in ranks)  # in place: no version is left


def test_a_late_rank_is_named_in_time(ranks):
    error, version, seconds = ranks[0]["late"]
    assert (
        "rank 1 did not make version 10 ready within --reshard-timeout-s (1)" in error and version == 9
    )  # nothing was written yet
    assert 0.9 <= seconds <= 6


@dataclass
class Receiver:
    """An engine of rank 0 that takes no time for a version."""

    process: str | None = None
    device: str = "cpu"
    tensors: dict[int, dict[str, torch.Tensor]] = field(default_factory=lambda: {0: {"w": torch.zeros(4, 4)}})

    def begin(self, version, arrivals, pulls, messages) -> None:
        messages()

    def verify(self, timeout_s: float) -> str | None:
        return None

    def commit(self, version: int) -> None:
        pass

    def give_up(self) -> None:
        pass


@pytest.fixture
def pair(monkeypatch):
    """pair(options, receiver) -> the part of rank 0, which receives, and that of rank 1, which sends, both in
    this process."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    plan = make_plan({1: {"w": whole("w", 4, 4)}}, {0: {"w": whole("w", 4, 4)}})

    def make(options: ReshardConfig, receiver: Receiver) -> list[WeightSync]:
        return [
            WeightSync(plan, 0, {0: 0}, {}, receiver, options),
            WeightSync(plan, 1, {0: 0}, {"w": torch.ones(4, 4)}, None, options),
        ]

    return make


def errors_of(parts: list[WeightSync]) -> list[tuple[str, float]]:
    """The error of each part after a sync of version 1, and the seconds that its `begin` took."""
    out: list[tuple[str, float]] = [("", 0.0)] * len(parts)

    def sync(part: WeightSync) -> None:
        start = time.monotonic()
        part.begin(1)
        seconds, error = time.monotonic() - start, ""
        try:
            part.finish()
        except SyncError as refused:
            error = str(refused)
        out[part.rank] = error, seconds

    threads = [threading.Thread(target=sync, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


@pytest.mark.parametrize("transport", ["auto", "messages"])
def test_a_source_that_fails_is_named_at_once(pair, monkeypatch, transport):
    """The receiver need not wait until the deadline, and the source's own error is told."""
    receiver = Receiver(process=None if transport == "auto" else "another process")
    parts = pair(ReshardConfig(reshard_timeout_s=300.0, reshard_transport=transport), receiver)

    def fail() -> None:
        raise OSError("/dev/shm is full")

    monkeypatch.setattr(parts[1], "_find_sources", fail)
    for error, seconds in errors_of(parts):
        assert error == "[rank 1] weights of version 1: OSError: /dev/shm is full"
        assert seconds < 100


def test_messages_wait_for_their_peers_until_the_deadline(pair, monkeypatch):
    """Rank 0 has announced itself and does not come: without the wait its peer would block in a message."""
    parts = pair(
        ReshardConfig(reshard_timeout_s=1.0, reshard_transport="messages"), Receiver("another process")
    )
    has_run = []
    monkeypatch.setattr(Transfer, "run", lambda self, deadline: has_run.append(deadline))
    monkeypatch.setattr(parts[0], "_run_messages", lambda: None)
    (error, _), (other, _) = errors_of(parts)
    assert error == other and not has_run
    assert "[rank 1] weights of version 1: rank 0 did not come to exchange version 1 within" in error


def test_messages_run_until_the_deadline_of_their_sync(pair, monkeypatch):
    parts = pair(ReshardConfig(reshard_transport="messages"), Receiver("another process"))
    deadlines = []
    monkeypatch.setattr(Transfer, "run", lambda self, deadline: deadlines.append(deadline))
    assert [error for error, _ in errors_of(parts)] == ["", ""]
    assert sorted(deadlines) == sorted(part._deadline for part in parts)


def test_another_process_copies_messages_only_when_the_gpu_has_them(pair, monkeypatch):
    """A wait for NCCL and the kernels that unpack are queued on a stream that the engine's process does not
    see."""
    receiver, happened = Receiver("another process", device="cuda"), []
    (part, _) = pair(ReshardConfig(reshard_transport="messages"), receiver)
    monkeypatch.setattr(part, "_connect", lambda: vars(part).update(_transports={}, _new_pulls={}))
    monkeypatch.setattr(part, "_announce", lambda version: None)
    monkeypatch.setattr(part, "_await_sources", lambda version: {})
    monkeypatch.setattr(part, "_run_messages", lambda: happened.append("messages"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("synchronize"))
    monkeypatch.setattr(receiver, "begin", lambda *_: happened.append("begin"))
    part.begin(1)
    assert part._problem is None and happened == ["messages", "synchronize", "begin"]

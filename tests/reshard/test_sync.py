"""A weight sync between two ranks, against the model that the shards were cut from; and what each kind of
failure leaves.

pytest tests/reshard/test_sync.py"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cuts import hf_model, make_shape

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

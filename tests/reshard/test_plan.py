"""Plans move every element to its place, whatever the two layouts, and refuse atlases that do not determine
it. Bit-exact.

Shards of both sides are cut by hand (cuts.py); a plan between the atlases is executed with slices on tensors
full of NaN.

    pytest tests/reshard/test_plan.py"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from megarl.reshard.atlas import Atlas, LocalParam, Piece, hf_atlas
from megarl.reshard.megatron_atlas import megatron_atlas
from megarl.reshard.plan import PlanError, ReshardPlan, _Senders, make_plan
from megarl.reshard.sync import sync_plan
from megarl.reshard.vllm_atlas import vllm_atlas, vllm_atlases
from tests.reshard.cuts import hf_model, make_shape, matrix, megatron_shard, vllm_shard

Shards = dict[int, dict[str, torch.Tensor]]


def execute(plan: ReshardPlan, sources: Shards, destinations: dict[int, Atlas]) -> Shards:
    out = {
        rank: {n: torch.full((p.rows, p.cols), float("nan")) for n, p in atlas.items()}
        for rank, atlas in destinations.items()
    }
    written = {
        rank: {n: torch.zeros(p.rows, p.cols, dtype=torch.int) for n, p in atlas.items()}
        for rank, atlas in destinations.items()
    }
    for rank, atlas in destinations.items():
        for name, param in atlas.items():
            out[rank][name][param.rows - param.padding_rows :] = 0
            written[rank][name][param.rows - param.padding_rows :] = 1
    for (src, dst), copies in plan.copies.items():
        for c in copies:
            place = (slice(c.dst_row, c.dst_row + c.rows), slice(c.dst_col, c.dst_col + c.cols))
            out[dst][c.dst_name][place] = sources[src][c.src_name][
                c.src_row : c.src_row + c.rows, c.src_col : c.src_col + c.cols
            ]
            written[dst][c.dst_name][place] += 1
    assert all((count == 1).all() for params in written.values() for count in params.values())
    return out


def random_layouts(rng: random.Random):
    """(shape, megatron tp, pp, dp, vllm tp, replicas), all divisible."""
    tp, vtp = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4, 8])
    groups = rng.choice([1, 2, 4, 8])
    heads = max(tp, vtp, groups) * rng.choice([1, 2])
    pp = rng.choice([1, 2, 3, 4])
    layers = pp * rng.choice([1, 2]) if pp < 3 else pp
    shape = make_shape(
        rng.choice(["qwen2", "qwen3", "llama"]),
        layers=layers,
        heads=heads,
        groups=groups,
        head_dim=rng.choice([8, 4]),
        ffn=8 * rng.randint(1, 5),
        hidden=rng.choice([8, 12]),
        vocab=rng.randint(1, 200),
        tied=rng.random() < 0.5,
    )
    return shape, tp, pp, rng.choice([1, 2]), vtp, rng.choice([1, 2])


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize("seed", range(40))
def test_any_megatron_layout_into_any_vllm_layout(seed):
    shape, tp, pp, dp, vtp, replicas = random_layouts(random.Random(seed))
    model = hf_model(shape, seed)
    where = {(s * dp + d) * tp + r: (r, s) for s in range(pp) for d in range(dp) for r in range(tp)}
    atlases = {rank: megatron_atlas(shape, tp, r, pp, s) for rank, (r, s) in where.items()}
    shards = {rank: megatron_shard(shape, model, tp, r, pp, s) for rank, (r, s) in where.items()}
    engines = vllm_atlases(shape, range(vtp * replicas), vtp)
    got = execute(make_plan(atlases, engines), shards, engines)
    for rank, params in got.items():
        expected = vllm_shard(shape, model, vtp, rank % vtp)
        assert params.keys() == expected.keys()
        assert all(torch.equal(params[name], expected[name]) for name in expected)


@pytest.mark.parametrize("seed", range(10))
def test_out_of_a_checkpoint_and_back(seed):
    shape, tp, pp, _, _, _ = random_layouts(random.Random(100 + seed))
    model = {name: matrix(tensor) for name, tensor in hf_model(shape, seed).items()}
    atlases = {s * tp + r: megatron_atlas(shape, tp, r, pp, s) for s in range(pp) for r in range(tp)}
    shards = execute(make_plan({0: hf_atlas(shape)}, atlases), {0: model}, atlases)
    back = execute(make_plan(atlases, {0: hf_atlas(shape)}), shards, {0: hf_atlas(shape)})[0]
    assert back.keys() == model.keys() and all(torch.equal(back[name], model[name]) for name in model)


def test_own_rank_wins_and_other_replicas_share_the_sending():
    shape = make_shape("qwen3")
    sources = {rank: megatron_atlas(shape, 1, 0) for rank in range(4)}  # four data-parallel replicas
    assert set(make_plan(sources, vllm_atlases(shape, range(4), 1)).copies) == {(r, r) for r in range(4)}
    elsewhere = make_plan(sources, {9: vllm_atlas(shape, 1, 0)})
    sent = elsewhere.num_bytes(itemsize=4)
    assert set(sent) == {(r, 9) for r in range(4)}
    whole = 4 * sum(t.numel() for t in hf_model(shape, 0).values())
    largest = 4 * max(t.numel() for t in hf_model(shape, 0).values())
    assert sum(sent.values()) == whole
    assert max(sent.values()) - min(sent.values()) <= largest  # one replica is ahead by a tensor at most
    assert elsewhere.ranks == (0, 1, 2, 3, 9)


def test_replicas_of_the_same_node_send_even_if_others_have_sent_less(monkeypatch):
    """Two data-parallel replicas of TP=2, one per node of four ranks; engines of TP=1 on the free ranks 2 and
    3 of each node."""
    shape = make_shape("qwen3")
    sources = {rank: megatron_atlas(shape, 2, rank % 4) for rank in (0, 1, 4, 5)}
    engines = [2, 3, 6, 7]
    destinations = vllm_atlases(shape, engines, 1)
    assert {src // 4 == dst // 4 for src, dst in make_plan(sources, destinations).copies} == {True, False}
    near = make_plan(sources, destinations, ranks_per_node=4)
    assert set(near.copies) == {(src, dst) for dst in engines for src in sources if src // 4 == dst // 4}
    monkeypatch.setenv("WORLD_SIZE", "8")
    for local, nodes, plan in (
        (4, 2, near),
        (8, 1, make_plan(sources, destinations)),
        (4, 3, make_plan(sources, destinations)),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
        assert sync_plan(shape, sources, engines, 1, 1.0)[0] == plan


class PlainSenders(_Senders):
    """Chooses as the docstring of `make_plan` says, by comparing all holders."""

    def choose(self, held, holders, destination):
        def preference(entry):
            source, per_node = entry[0], self._ranks_per_node
            elsewhere = per_node is not None and source // per_node != destination // per_node
            return source != destination, elsewhere, self.sent[source]

        return min(held, key=preference)


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize("seed", range(40))
def test_the_sender_is_the_nearest_one_that_has_sent_least(seed, monkeypatch):
    rng = random.Random(200 + seed)
    shape, tp, pp, _, vtp, replicas = random_layouts(rng)
    where = {(s * 6 + d) * tp + r: (r, s) for s in range(pp) for d in range(6) for r in range(tp)}
    sources = {rank: megatron_atlas(shape, tp, r, pp, s) for rank, (r, s) in where.items()}
    first = rng.choice([0, len(sources) // 2, len(sources)])  # colocated, partly, apart
    destinations = vllm_atlases(shape, range(first, first + vtp * replicas), vtp)
    per_node = rng.choice([None, 2, 4, 8])
    plan = make_plan(sources, destinations, per_node)
    monkeypatch.setattr("megarl.reshard.plan._Senders", PlainSenders)
    assert plan == make_plan(sources, destinations, per_node)


def without_piece(atlas: Atlas, name: str, hf_name: str) -> Atlas:
    param = atlas[name]
    return atlas | {
        name: dataclasses.replace(param, pieces=tuple(p for p in param.pieces if p.hf_name != hf_name))
    }


def test_a_dropped_source_piece_is_named():
    shape = make_shape("qwen3")
    source = megatron_atlas(shape, 1, 0)
    source.pop("decoder.layers.1.mlp.linear_fc2.weight")
    with pytest.raises(
        PlanError,
        match=r"\[rank 5\] model.layers.1.mlp.down_proj.weight: no source holds "
        r"model.layers.1.mlp.down_proj.weight\[0:32, 0:48\]",
    ):
        make_plan({0: source}, {5: vllm_atlas(shape, 1, 0)})
    halves = {0: megatron_atlas(shape, 2, 0)}  # tensor-parallel rank 1 forgotten
    with pytest.raises(
        PlanError, match=r"embed_tokens.weight: no source holds model.embed_tokens.weight\[32:61, 0:32\]"
    ):
        make_plan(halves, {0: vllm_atlas(shape, 1, 0)})


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_hole_in_an_atlas_is_named(side):
    shape = make_shape("qwen3")
    name, v_proj = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    holed = {0: without_piece(vllm_atlas(shape, 1, 0), name, v_proj)}
    whole = {0: vllm_atlas(shape, 1, 0)}
    with pytest.raises(
        PlanError, match=rf"\[rank 0\] {side} {name}: no piece fills \[48:64, 0:32\] of its 64 x 32"
    ):
        make_plan(*((holed, whole) if side == "source" else (whole, holed)))


def test_an_overlap_is_named():
    def atlas(second_at: int) -> dict[int, Atlas]:
        return {
            0: {"w": LocalParam(4, 2, (Piece("a", 0, 2, 0, 2, 0, 0), Piece("b", 0, 2, 0, 2, second_at, 0)))}
        }

    make_plan(atlas(2), atlas(2))
    with pytest.raises(
        PlanError, match=r"destination w: b\[0:2, 0:2\] and a\[0:2, 0:2\] both land on \[1:2, 0:2\]"
    ):
        make_plan(atlas(2), atlas(1))
    with pytest.raises(
        PlanError, match=r"source w: b\[0:2, 0:2\] lands on \[3:5, 0:2\], outside of \[0:4, 0:2\]"
    ):
        make_plan(atlas(3), atlas(2))


def test_overlapping_sources_still_write_each_element_once():
    model = torch.randn(6, 3)
    sources = {
        0: {"top": LocalParam(4, 3, (Piece("m", 0, 4, 0, 3, 0, 0),))},
        1: {"bottom": LocalParam(4, 3, (Piece("m", 2, 6, 0, 3, 0, 0),))},
    }
    shards = {0: {"top": model[:4]}, 1: {"bottom": model[2:]}}
    destination = {1: {"m": LocalParam(6, 3, (Piece("m", 0, 6, 0, 3, 0, 0),))}}
    plan = make_plan(sources, destination)
    assert torch.equal(execute(plan, shards, destination)[1]["m"], model)
    assert plan.num_bytes(4) == {(0, 1): 2 * 3 * 4, (1, 1): 4 * 3 * 4}  # rank 1 keeps what it has itself

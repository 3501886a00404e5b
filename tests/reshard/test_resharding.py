"""Any Megatron layout into any vLLM layout equals gather-then-split, bit for bit, in 2,000 random cases;
mutated plans never do.

The oracle (oracle.py) is numpy and shares no code with megarl.reshard. Exact: copies change nothing, and one
rounding is one rounding.

    pytest tests/reshard/test_resharding.py        50 of them; -m nightly all"""

from __future__ import annotations

import dataclasses
import functools
import random
from dataclasses import dataclass

import numpy as np
import pytest

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.reshard.alias import find_aliases
from megarl.reshard.atlas import Atlas
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.plan import RectCopy, ReshardPlan, make_plan
from megarl.reshard.vllm_atlas import vllm_atlases
from tests.reshard.cuts import make_shape
from tests.reshard.oracle import Arrays, Layout, full_model, gather, megatron_shard, stack_qkv, vllm_shard

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
DTYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float64", "float32"))


@dataclass
class Case:
    """Two layouts of one model, and every number that a copy may carry."""

    shape: ModelShape
    layout: Layout
    te: bool
    vllm_tp: int
    mesh: MeshSpec
    engines: dict[int, Atlas]
    sources: dict[int, Atlas]
    shards: dict[int, Arrays]
    expected: dict[int, Arrays]
    plan: ReshardPlan
    dtypes: tuple[str, str]


def in_dtype(arrays: Arrays, dtype: str) -> Arrays:
    """The numbers 0, 1, ... as values of a dtype, all different. bfloat16, which numpy has not, is its 16
    bits; float64 gets thirds, so that float32 rounds them."""
    third = 1 / 3 if dtype == "float64" else 0
    return {
        name: (array + third if third else array).astype("uint16" if dtype == "bfloat16" else dtype)
        for name, array in arrays.items()
    }


@functools.cache
def shared_case(seed: int) -> tuple[Case, tuple]:
    """Return a case that several tests look at and none changes, and the state of its random numbers."""
    rng = random.Random(seed)
    return make_case(rng), rng.getstate()


def make_case(rng: random.Random, family: str | None = None) -> Case:
    family = family or rng.choice(FAMILIES)
    tp, vllm_tp = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4, 8])
    pp = rng.choice([1, 1, 2, 3, 4])
    vpp = rng.choice([1, 2, 3]) if pp > 1 else 1
    groups = rng.choice([1, 2, 4, 8])
    heads = max(tp, vllm_tp, groups) * rng.choice([1, 2])
    dp, experts = rng.choice([1, 2, 4]) if tp < 8 else 1, rng.choice([4, 6, 8])
    splits = [
        (ep, etp)
        for ep in range(1, experts + 1)
        for etp in (1, 2, 4, 8)
        if experts % ep == 0 and tp * dp % (ep * etp) == 0
    ]
    ep, etp = rng.choice(splits) if family == "qwen3_moe" else (1, tp)
    head_dim = rng.choice([d for d in (2, 4, 8) if (heads + 2 * groups) * d % tp == 0])
    shape = make_shape(
        family,
        layers=pp * vpp * (rng.choice([1, 2]) if pp * vpp < 3 else 1),
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        ffn=8 * rng.randint(1, 3),
        hidden=rng.choice([4, 6]),
        vocab=rng.randint(1, 300),
        tied=rng.random() < 0.5,
        experts=experts,
    )
    layout, te = Layout(tp, dp, pp, vpp, ep, etp), rng.random() < 0.5
    ranks = tuple(sorted(rng.sample(range(2 * layout.size), layout.size)))
    mesh = MeshSpec(ranks, tp, pp, ep, etp, rng.choice([cp for cp in (1, 2, 4) if dp % cp == 0]), vpp)
    first = rng.choice([0, 5])
    engine_ranks = tuple(range(first, first + vllm_tp * rng.choice([1, 2])))
    model, dtypes = full_model(shape), rng.choice(DTYPES)
    shards = [megatron_shard(shape, model, layout, index, te) for index in range(layout.size)]
    back = gather(shape, layout, shards, te)
    assert back.keys() == model.keys()
    of_rank = [
        in_dtype(in_dtype(vllm_shard(shape, back, vllm_tp, r), dtypes[0]), dtypes[1]) for r in range(vllm_tp)
    ]
    qkv_layout = rng.choice(["grouped", "stacked"]) if groups % tp == 0 else "grouped"
    if qkv_layout == "stacked":
        shards = [stack_qkv(shape, shard, tp) for shard in shards]
    sources, engines = (
        megatron_atlases(shape, mesh, te, qkv_layout),
        vllm_atlases(shape, engine_ranks, vllm_tp),
    )
    return Case(
        shape,
        layout,
        te,
        vllm_tp,
        mesh,
        engines,
        sources,
        {rank: in_dtype(s, dtypes[0]) for rank, s in zip(ranks, shards)},
        {rank: of_rank[i % vllm_tp] for i, rank in enumerate(engine_ranks)},
        make_plan(sources, engines, rng.choice([None, 2, 4])),
        dtypes,
    )


def execute(case: Case, plan: ReshardPlan) -> dict[int, Arrays]:
    """The plan as numpy copies into arrays that hold what padding holds, and the check that nothing is
    written twice."""
    out = {
        rank: {
            name: in_dtype(in_dtype({"": np.full((p.rows, p.cols), -1)}, case.dtypes[0]), case.dtypes[1])[""]
            for name, p in atlas.items()
        }
        for rank, atlas in case.engines.items()
    }
    for (src, dst), copies in plan.copies.items():
        for c in copies:
            part = case.shards[src][c.src_name][
                c.src_row : c.src_row + c.rows, c.src_col : c.src_col + c.cols
            ]
            out[dst][c.dst_name][c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols] = part
    return out


def is_right(case: Case, plan: ReshardPlan) -> bool:
    got = execute(case, plan)
    written = sum(c.num_elements for copies in plan.copies.values() for c in copies)
    held = sum((p.rows - p.padding_rows) * p.cols for atlas in case.engines.values() for p in atlas.values())
    return written == held and all(
        got[rank].keys() == expected.keys()
        and all(np.array_equal(got[rank][name], array) for name, array in expected.items())
        for rank, expected in case.expected.items()
    )


@pytest.mark.parametrize(
    "block",
    [0, *(pytest.param(block, marks=pytest.mark.nightly) for block in range(1, 40))],
)
def test_random_layouts_equal_gather_then_split(block):
    for seed in range(50 * block, 50 * block + 50):
        case = shared_case(seed)[0] if block == 0 else make_case(random.Random(seed))
        for index, rank in enumerate(case.mesh.ranks):  # the source atlases have the oracle's names and sizes
            assert {n: (p.rows, p.cols) for n, p in case.sources[rank].items()} == {
                n: a.shape for n, a in case.shards[rank].items()
            }, seed
            assert case.mesh.coordinates(rank)["tp"] == index % case.layout.tp
        assert is_right(case, case.plan), (
            f"seed {seed}: {case.shape} {case.layout} te {case.te} -> tp {case.vllm_tp}"
        )


# ------------------------------------------------------------------ mutations


def changed(plan: ReshardPlan, pair: tuple[int, int], index: int, by: RectCopy | None) -> ReshardPlan:
    copies = list(plan.copies[pair])
    copies[index : index + 1] = [by] if by else []
    return ReshardPlan(plan.copies | {pair: tuple(copies)})


def any_copy(
    case: Case, rng: random.Random, wanted=lambda copy: True
) -> tuple[tuple[int, int], int, RectCopy] | None:
    """(pair, index, copy) of one that is wanted."""
    found = [
        (pair, index, c)
        for pair, copies in case.plan.copies.items()
        for index, c in enumerate(copies)
        if wanted(c)
    ]
    return rng.choice(found) if found else None


def drop(case: Case, rng: random.Random) -> ReshardPlan:
    pair, index, _ = any_copy(case, rng)
    return changed(case.plan, pair, index, None)


def shifted(field: str):
    """One row or column before the right one."""

    def shift(case: Case, rng: random.Random) -> ReshardPlan | None:
        chosen = any_copy(case, rng, lambda copy: getattr(copy, field) > 0)
        if chosen is None:
            return None
        pair, index, copy = chosen
        return changed(case.plan, pair, index, dataclasses.replace(copy, **{field: getattr(copy, field) - 1}))

    shift.__name__ = f"shift_{field}"
    return shift


def swap_experts(case: Case, rng: random.Random) -> ReshardPlan | None:
    """Two experts of one rank and layer, one written in the other's place."""
    pair, index, copy = any_copy(case, rng, lambda copy: ".experts." in copy.dst_name)
    others = [
        (i, c)
        for i, c in enumerate(case.plan.copies[pair])
        if c.src_name != copy.src_name
        and c.dst_name == copy.dst_name
        and (c.rows, c.cols) == (copy.rows, copy.cols)
    ]
    if not others:
        return None
    at, other = rng.choice(others)
    swapped = changed(
        case.plan, pair, index, dataclasses.replace(copy, src_name=other.src_name, src_row=other.src_row)
    )
    return changed(
        swapped, pair, at, dataclasses.replace(other, src_name=copy.src_name, src_row=copy.src_row)
    )


MUTATIONS = [drop, *map(shifted, ("src_row", "src_col", "dst_row", "dst_col")), swap_experts]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_every_mutation_of_a_plan_is_caught(mutate):
    caught = 0
    for seed in range(30):
        rng = random.Random(seed)
        if mutate is swap_experts:
            case = make_case(rng, "qwen3_moe")
        else:
            case, state = shared_case(seed)
            rng.setstate(state)
        mutated = mutate(case, rng)
        if mutated is not None:
            assert not is_right(case, mutated), seed
            caught += 1
    assert caught >= 5


# ------------------------------------------------------------------ aliases and replicas


def test_aliased_parameters_are_those_that_are_alike_on_both_sides():
    aliases = 0
    for seed in range(75):
        case = shared_case(seed)[0] if seed < 50 else make_case(random.Random(seed))
        for rank in case.sources.keys() & case.engines.keys():
            names = find_aliases(case.sources[rank], case.engines[rank])
            here = in_dtype(case.shards[rank], case.dtypes[1])
            for name, expected in case.expected[rank].items():
                alike = [source for source, array in here.items() if np.array_equal(array, expected)]
                if case.engines[rank][
                    name
                ].pieces:  # a share of the vocabulary may be padding alone: nothing to copy, nothing to alias
                    assert names.get(name) in (alike or [None]), (seed, rank, name)
            aliases += len(names)
    assert aliases > 250


def test_replicas_of_experts_share_the_sending_and_stay_in_their_node():
    shape = make_shape("qwen3_moe", layers=4, experts=8)
    mesh = MeshSpec(
        tuple(range(8)), tp=2, ep=2, etp=1
    )  # dense weights on 4 pairs of ranks, each expert on 4 ranks
    sources = megatron_atlases(shape, mesh)
    elsewhere = make_plan(sources, vllm_atlases(shape, (20, 21), 2)).num_bytes(1)
    sent = [sum(size for (src, _), size in elsewhere.items() if src == rank) for rank in range(8)]
    largest = max(array.size for array in full_model(shape).values())
    assert max(sent) - min(sent) <= 2 * largest and min(sent) > 0
    plan = make_plan(sources, vllm_atlases(shape, range(8), 2), ranks_per_node=4)
    assert all(src // 4 == dst // 4 for src, dst in plan.copies)  # every node holds a whole model

"""What an engine can take over as it is. The expected names follow from the two sides' documented layouts,
not from the atlases.

pytest tests/reshard/test_alias.py"""

from __future__ import annotations

import pytest

from megarl.reshard.alias import find_aliases, without
from megarl.reshard.megatron_atlas import megatron_atlas
from megarl.reshard.plan import make_plan
from megarl.reshard.vllm_atlas import vllm_atlas
from tests.reshard.cuts import make_shape

LAYERS = 2
QKV = ("self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias")


def left_over(shape, train_tp: int, rollout_tp: int, **layout) -> set[str]:
    """Engine parameters of rank 1 (0 of one) that need a copy, without their layer."""
    rank = min(1, train_tp - 1)
    engine = vllm_atlas(shape, rollout_tp, rank % rollout_tp)
    return {
        name.removeprefix(f"model.layers.{i}.")
        for i in range(LAYERS)
        for name in without(engine, find_aliases(megatron_atlas(shape, train_tp, rank, **layout), engine))
        if not name.startswith(f"model.layers.{1 - i}.")
    }


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads, groups, tp", [(4, 2, 1), (4, 2, 2), (8, 8, 4), (8, 2, 1)])
def test_at_equal_tensor_parallelism_only_interleaved_qkv_is_copied(model_type, tied, heads, groups, tp):
    shape = make_shape(
        model_type, heads=heads, groups=groups, vocab=201, tied=tied, layers=LAYERS
    )  # the vocabulary needs padding
    qkv = set(QKV) if model_type == "qwen2" else {QKV[0]}
    # With one group per rank Megatron's [q, ..., q, k, v] is vLLM's [Q; K; V].
    assert left_over(shape, tp, tp) == (set() if groups == tp else qkv)
    assert left_over(shape, tp, tp, qkv_layout="stacked") == set()


def test_at_other_sizes_only_what_is_replicated_is_shared():
    shape = make_shape("qwen3", layers=LAYERS)
    copied = {
        "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert left_over(shape, 2, 1) == left_over(shape, 2, 1, qkv_layout="stacked") == copied


def test_a_pipeline_stage_shares_the_layers_it_has():
    shape = make_shape("qwen3", layers=4, tied=True)
    engine = vllm_atlas(shape, 1, 0)
    last = find_aliases(megatron_atlas(shape, 1, 0, 2, 1, qkv_layout="stacked"), engine)
    assert (
        last["model.layers.2.self_attn.qkv_proj.weight"]
        == "decoder.layers.0.self_attention.linear_qkv.weight"
    )
    assert (
        last["model.embed_tokens.weight"] == "output_layer.weight"
    )  # the last stage's copy of the tied embedding
    assert not any(name.startswith(("model.layers.0.", "model.layers.1.")) for name in last)


def test_the_plan_of_what_is_left_over_is_complete():
    shape = make_shape("qwen2", heads=4, groups=2, layers=LAYERS)
    source, engine = megatron_atlas(shape, 1, 0), vllm_atlas(shape, 1, 0)
    rest = without(engine, find_aliases(source, engine))
    plan = make_plan({0: source}, {0: rest})
    assert (
        sum(c.num_elements for copies in plan.copies.values() for c in copies)
        == sum(p.rows * p.cols for p in rest.values())
        > 0
    )


def test_more_ranks_than_key_heads_have_no_stacked_layout():
    with pytest.raises(ValueError, match="2 cannot be cut into 4 equal parts"):
        megatron_atlas(make_shape("qwen3", heads=4, groups=2), 4, 0, qkv_layout="stacked")

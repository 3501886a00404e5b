"""Atlases against shards that are cut by hand (cuts.py), and against what they refuse. Torch only, no engine.
Bit-exact.

pytest tests/reshard/test_atlas.py"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import Atlas, LocalParam, Piece, hf_atlas
from megarl.reshard.megatron_atlas import MegatronPlace, megatron_atlas, place_atlas
from megarl.reshard.vllm_atlas import vllm_atlas, vllm_atlases
from tests.reshard.cuts import hf_model, make_shape, matrix, megatron_shard, vllm_shard


def cut_by(atlas: Atlas, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shard = {}
    for name, param in atlas.items():
        shard[name] = torch.full((param.rows, param.cols), float("nan"))
        shard[name][param.rows - param.padding_rows :] = 0
        for p in param.pieces:
            part = matrix(model[p.hf_name])[p.row_start : p.row_end, p.col_start : p.col_end]
            shard[name][
                p.local_row : p.local_row + part.shape[0], p.local_col : p.local_col + part.shape[1]
            ] = part
    return shard


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [
        name
        for name in expected
        if got[name].shape != expected[name].shape or not torch.equal(got[name], expected[name])
    ]
    assert not different


CASES = [  # heads, groups, tp: one key head per rank, several, a shared one
    ("qwen2", 4, 2, 2),
    ("qwen3", 4, 2, 1),
    ("qwen3", 8, 2, 4),
    ("llama", 8, 8, 4),
    ("llama", 6, 3, 3),
    ("qwen2", 8, 1, 8),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type, heads, groups, tp", CASES)
def test_shards_are_those_cut_by_hand(model_type, heads, groups, tp, tied):
    vocab = 189 if tp == 3 else 201  # 192 rows are divisible by 3, 256 by the others
    shape = make_shape(model_type, heads=heads, groups=groups, vocab=vocab, tied=tied, layers=4)
    model = hf_model(shape, seed=0)
    for r in range(tp):
        assert_same(cut_by(vllm_atlas(shape, tp, r), model), vllm_shard(shape, model, tp, r))
        for pp in (1, 2, 4):
            for stage in range(pp):
                assert_same(
                    cut_by(megatron_atlas(shape, tp, r, pp, stage), model),
                    megatron_shard(shape, model, tp, r, pp, stage),
                )


def test_transformer_engine_fuses_the_norms_into_other_names():
    shape = make_shape("qwen3")
    local, fused = megatron_atlas(shape, 2, 1), megatron_atlas(shape, 2, 1, te_spec=True)
    renamed = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    for layer in range(2):
        for old, new in renamed.items():
            assert fused.pop(f"decoder.layers.{layer}.{new}") == local.pop(f"decoder.layers.{layer}.{old}")
    assert fused == local


def test_engines_are_consecutive_blocks_of_ranks():
    shape = make_shape("qwen3")
    atlases = vllm_atlases(shape, ranks=(3, 4, 7, 8), tp_size=2)
    assert atlases == {
        3: vllm_atlas(shape, 2, 0),
        4: vllm_atlas(shape, 2, 1),
        7: vllm_atlas(shape, 2, 0),
        8: vllm_atlas(shape, 2, 1),
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"])
def test_hf_atlas_is_what_transformers_saves(model_type, tied, tmp_path):
    import transformers
    from safetensors.torch import load_file

    shape = make_shape(model_type, vocab=61, tied=tied)
    config = transformers.AutoConfig.for_model(
        model_type,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=61,
        tie_word_embeddings=tied,
        num_experts=4,
        moe_intermediate_size=48,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    saved = {name: tuple(matrix(t).shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert {name: (param.rows, param.cols) for name, param in hf_atlas(shape).items()} == saved


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"])
def test_hf_atlas_of_a_value_model_is_what_transformers_saves(model_type, tmp_path):
    import transformers
    from safetensors.torch import load_file

    config = transformers.AutoConfig.for_model(
        model_type,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=61,
        tie_word_embeddings=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        num_labels=1,
        sliding_window=None,
    )
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    shape = ModelShape.load(tmp_path, value_head=True)
    saved = {name: tuple(matrix(t).shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert {name: (param.rows, param.cols) for name, param in hf_atlas(shape).items()} == saved


@pytest.mark.parametrize("pp, vpp", [(1, 1), (2, 1), (2, 2)])
def test_a_value_head_is_whole_on_the_last_stage_and_replaces_the_output_layer(pp, vpp):
    policy = make_shape("qwen3", layers=4)
    shape = replace(policy, value_head=True)
    for stage in range(pp):
        for r in range(2):
            place = MegatronPlace(2, r, pp, stage, vpp)
            expected, prefix = place_atlas(policy, place), f"chunks.{vpp - 1}." if vpp > 1 else ""
            if stage == pp - 1:
                del expected[f"{prefix}output_layer.weight"]
                expected[f"{prefix}value_head.weight"] = LocalParam(
                    1, 32, (Piece("score.weight", 0, 1, 0, 32, 0, 0),)
                )
            assert place_atlas(shape, place) == expected


def test_sizes_that_do_not_divide_are_refused():
    """The rules of the configuration name the flags and sizes that work (tests/config)."""
    shape = make_shape("qwen3", heads=6, groups=2, ffn=48, vocab=61)
    experts = make_shape("qwen3_moe", experts=6, ffn=20)
    for build in (
        lambda: vllm_atlas(shape, 5, 0),
        lambda: megatron_atlas(shape, 3, 0),
        lambda: megatron_atlas(shape, 1, 0, pp_size=3),
        lambda: place_atlas(experts, MegatronPlace(ep_size=4)),
        lambda: place_atlas(experts, MegatronPlace(etp_size=8, etp_rank=0)),
        lambda: place_atlas(experts, MegatronPlace(pp_size=2, vpp_size=2)),
        lambda: vllm_atlas(make_shape("qwen3_moe", ffn=21), 2, 0),
    ):
        with pytest.raises(ValueError, match="cannot be cut into . equal parts"):
            build()

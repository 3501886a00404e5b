"""What is special about DeepSeek-V3's folders: a tensor that stays fp32 in bf16 files, and layers that are
left out and said so. Exact.

pytest tests/reshard/test_deepseek_files.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import hf_atlas, hf_sizes
from megarl.reshard.megatron_atlas import megatron_atlas
from megarl.reshard.hf_weights import load_hf, save_hf

CONFIG = dict(
    model_type="deepseek_v3",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=61,
    q_lora_rank=6,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=3,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=5,
    first_k_dense_replace=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    num_nextn_predict_layers=1,
    torch_dtype="bfloat16",
)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
FURTHER = "model.layers.2.eh_proj.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    """As published: bf16 but for the correction, and with a layer for multi-token prediction."""
    source, generator = tmp_path / "source", torch.Generator().manual_seed(0)
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    full = {
        name: torch.randn(size if size[1] > 1 else size[:1], generator=generator)
        for name, size in hf_sizes(ModelShape.load(source)).items()
    }
    save_file(
        {name: t if name == BIAS else t.bfloat16() for name, t in full.items()}
        | {FURTHER: torch.zeros(2, 2)},
        source / "model.safetensors",
    )
    return source


def parameters(shape: ModelShape) -> tuple[dict, dict[str, torch.Tensor]]:
    """As Megatron has them: the correction is fp32 beside bf16 parameters."""
    atlas = megatron_atlas(shape, 1, 0)
    return atlas, {
        name: torch.empty(
            p.rows, p.cols, dtype=torch.float32 if name.endswith("expert_bias") else torch.bfloat16
        )
        for name, p in atlas.items()
    }


def test_the_correction_of_scores_keeps_its_bits_in_a_bf16_model(folder, tmp_path):
    shape = ModelShape.load(folder)
    atlas, tensors = parameters(shape)
    load_hf(folder, atlas, tensors, shape)
    save_hf(tmp_path / "export", folder, shape, {0: atlas}, tensors)
    source, export = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "export" / "model.safetensors"),
    )
    assert export.keys() == source.keys() - {FURTHER} == hf_atlas(shape).keys()
    assert all(
        export[name].dtype == source[name].dtype and torch.equal(export[name], source[name])
        for name in export
    )
    assert export[BIAS].dtype == torch.float32 and not torch.equal(
        export[BIAS], export[BIAS].bfloat16().float()
    )


def test_layers_for_further_tokens_do_not_vanish_silently(folder, tmp_path, caplog):
    shape = ModelShape.load(folder)
    atlas, tensors = parameters(shape)
    load_hf(folder, atlas, tensors, shape)
    assert "the 1 tensors of model.layers.2.* predict further tokens. They are left out" in caplog.text
    save_hf(tmp_path / "export", folder, shape, {0: atlas}, tensors)
    assert "num_nextn_predict_layers is 0 in its config.json" in caplog.text
    assert json.loads((tmp_path / "export" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert ModelShape.load(tmp_path / "export").num_nextn_predict_layers == 0


def test_tensors_of_no_layer_are_still_refused(folder):
    save_file(
        load_file(folder / "model.safetensors") | {"model.layers.3.eh_proj.weight": torch.zeros(1)},
        folder / "model.safetensors",
    )
    shape = ModelShape.load(folder)
    with pytest.raises(
        ValueError, match=r"model\.layers\.3\.eh_proj\.weight is not a tensor of a deepseek_v3 model"
    ):
        load_hf(folder, *parameters(shape), shape)


def test_transformer_engine_fuses_the_norms_of_latents_into_what_expands_them():
    """And leaves those alone that several layers follow: latent attention's input, a mixture's."""
    from megarl.reshard.megatron_atlas import MegatronPlace, place_atlas

    shape = _shape()
    local, fused = place_atlas(shape, MegatronPlace()), place_atlas(shape, MegatronPlace(), te_spec=True)
    renamed = {name for name in fused if name not in local and ".experts." not in name}
    assert renamed == {
        f"decoder.layers.{layer}.self_attention.linear_{kind}_up_proj.layer_norm_weight"
        for layer in (0, 1)
        for kind in ("q", "kv")
    } | {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight"}
    assert {
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
    } <= fused.keys()


def _shape() -> ModelShape:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        return ModelShape.load(folder)

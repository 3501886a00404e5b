"""What the Megatron atlas says without a model: layers of virtual stages and the names of the Transformer
Engine spec are Megatron's; and what random weights are by it.

pytest tests/megatron/test_names.py"""

from __future__ import annotations

import dataclasses

import pytest

from megarl.megatron.cpu_shim import cpu_megatron
from megarl.reshard.megatron_atlas import MegatronPlace, place_atlas
from tests.reshard.cuts import make_shape


@pytest.mark.parametrize(
    "pp, vpp, layers", [(1, 1, 4), (2, 1, 4), (2, 2, 4), (2, 3, 12), (4, 2, 16), (4, 4, 16)]
)
def test_layers_of_virtual_stages_are_those_that_megatron_builds(pp, vpp, layers):
    with cpu_megatron():
        import torch
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.transformer_block import get_num_layers_to_build
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.float32,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            moe_token_dispatcher_type="alltoall",
        )
        for stage in range(pp):
            atlas = place_atlas(
                make_shape("llama", layers=layers), MegatronPlace(pp_size=pp, pp_rank=stage, vpp_size=vpp)
            )
            held = {}
            for name, param in atlas.items():
                if name.endswith("mlp.linear_fc2.weight"):
                    held[name.removesuffix(".mlp.linear_fc2.weight")] = int(
                        param.pieces[0].hf_name.split(".")[2]
                    )
            expected = {}
            for chunk in range(vpp):
                place = dict(vp_stage=chunk if vpp > 1 else None, pp_rank=stage)
                offset, count = (
                    get_transformer_layer_offset(config, **place),
                    get_num_layers_to_build(config, **place),
                )
                prefix = f"chunks.{chunk}." if vpp > 1 else ""
                expected |= {f"{prefix}decoder.layers.{local}": offset + local for local in range(count)}
            assert held == expected


def test_transformer_engine_names_are_those_of_megatrons_own_map():
    """Megatron's local spec says under which names a checkpoint of the Transformer Engine spec has its
    norms."""
    with cpu_megatron():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    renamed = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    shape = make_shape("qwen3", layers=1)
    local, fused = place_atlas(shape, MegatronPlace()), place_atlas(shape, MegatronPlace(), te_spec=True)

    def theirs(name: str) -> str:
        prefix, inner = (
            (name[: len("decoder.layers.0.")], name[len("decoder.layers.0.") :])
            if ".layers." in name
            else ("", name)
        )
        return prefix + next(
            (new + inner.removeprefix(old) for old, new in renamed.items() if inner.startswith(old)), inner
        )

    assert {theirs(name): param for name, param in local.items()} == fused and local.keys() != fused.keys()


@pytest.mark.parametrize("zero_centered", [False, True])
def test_random_norms_multiply_by_one(zero_centered):
    import torch

    from megarl.megatron.initialize import random_weights

    shape = dataclasses.replace(make_shape("qwen3", layers=1), zero_centered_norms=zero_centered)
    atlas = place_atlas(shape, MegatronPlace())
    parameters = {name: torch.full((param.rows, param.cols), 7.0) for name, param in atlas.items()}
    random_weights(shape, atlas, parameters, seed=0)
    norms = [parameter for name, parameter in parameters.items() if "norm" in name]
    assert len(norms) == 5 and all(torch.equal(norm + zero_centered, torch.ones_like(norm)) for norm in norms)
    assert 0.01 < parameters["decoder.layers.0.mlp.linear_fc1.weight"].std() < 0.03

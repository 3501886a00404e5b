"""Adapters in every layout are rectangles of the same canonical tensors, cut as the matrices that they adapt.
Torch only.

pytest tests/reshard/test_lora_atlas.py"""

from __future__ import annotations

import pytest
import torch

from megarl.config.mesh import MeshSpec
from megarl.config.schema import LoRAConfig
from megarl.megatron.initialize import initial_adapters
from megarl.reshard.atlas import Atlas, LocalParam, Piece, Sizes, hf_atlas
from megarl.reshard.lora_atlas import adapter_sizes, peft_atlas, with_adapters
from megarl.reshard.megatron_atlas import MegatronPlace, megatron_atlases, place_atlas
from megarl.reshard.plan import make_plan
from tests.reshard.cuts import make_shape

LORA = LoRAConfig(lora_rank=3, lora_alpha=6.0)
SHAPES = {
    "qwen2": make_shape("qwen2", heads=8, groups=2, layers=4),
    "llama": make_shape("llama", heads=4, groups=4, layers=4),
    "qwen3_moe": make_shape("qwen3_moe", heads=4, groups=2, layers=4),
}
MESHES = {  # name -> (mesh, layout of linear_qkv)
    "one": (MeshSpec((0,)), "grouped"),
    "tp2_pp2": (MeshSpec((0, 1, 2, 3), tp=2, pp=2), "grouped"),
    "tp2_stacked": (MeshSpec((0, 1), tp=2), "stacked"),
    "tp4": (MeshSpec((0, 1, 2, 3), tp=4), "grouped"),  # more ranks than key heads, in qwen2
    "pp2_vpp2": (MeshSpec((0, 1), pp=2, vpp=2), "grouped"),
}
EXPERTS_SPLIT = {"qwen3_moe": ("one",)}  # the others are for dense models


def cases() -> list[tuple[str, str]]:
    return [(model, mesh) for model in SHAPES for mesh in EXPERTS_SPLIT.get(model, MESHES)]


def random(sizes: Sizes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}


def cut(atlas: Atlas, full: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    param = atlas[name]
    out = torch.full((param.rows, param.cols), float("nan"), dtype=torch.float64)
    for p in param.pieces:
        part = full[p.hf_name][p.row_start : p.row_end, p.col_start : p.col_end]
        out[p.local_row : p.local_row + part.shape[0], p.local_col : p.local_col + part.shape[1]] = part
    return out


@pytest.mark.parametrize("model, mesh", cases())
def test_the_product_of_a_ranks_parts_is_its_part_of_the_product(model, mesh):
    """B A of the canonical adapters, added to W by PEFT's names and then cut, is what a rank computes of what
    it holds."""
    shape, (spec, qkv_layout) = SHAPES[model], MESHES[mesh]
    full, peft = random(adapter_sizes(shape, LORA)), peft_atlas(shape, LORA)
    deltas = {}
    for name, param in peft.items():
        if name.endswith(".lora_A.weight"):
            canonical = name.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"
            up = peft[name.replace("lora_A", "lora_B")]
            deltas[canonical] = full[up.pieces[0].hf_name] @ full[param.pieces[0].hf_name]
    adapted = 0
    for atlas in megatron_atlases(shape, spec, qkv_layout=qkv_layout).values():
        whole = with_adapters(atlas, LORA)
        for name in (name for name in whole if name.endswith(".adapter.linear_in.weight")):
            base, adapted = name.replace(".adapter.linear_in.weight", ".weight"), adapted + 1
            product = cut(whole, full, name.replace("linear_in", "linear_out")) @ cut(whole, full, name)
            torch.testing.assert_close(product, cut(atlas, deltas, base), rtol=1e-12, atol=1e-12)
    targets = 2 if shape.is_moe else 4
    assert adapted == targets * shape.num_layers // spec.pp * len(spec.ranks)
    assert (
        len(deltas) == (4 if shape.is_moe else 7) * shape.num_layers
        and deltas.keys() <= hf_atlas(shape).keys()
    )


@pytest.mark.parametrize("model, mesh", cases())
def test_any_layout_holds_every_element_of_every_adapter(model, mesh):
    """`make_plan` proves it: what PEFT gets is filled by the ranks of a layout, and so is any other
    layout."""
    shape, (spec, qkv_layout) = SHAPES[model], MESHES[mesh]
    sources = {
        rank: with_adapters(atlas, LORA)
        for rank, atlas in megatron_atlases(shape, spec, qkv_layout=qkv_layout).items()
    }
    make_plan(sources, {0: peft_atlas(shape, LORA)})
    make_plan(sources, {0: with_adapters(place_atlas(shape, MegatronPlace()), LORA)})


@pytest.mark.parametrize("mesh", MESHES)
def test_training_starts_equal_in_every_layout_and_as_peft_does(mesh):
    shape, (spec, qkv_layout) = SHAPES["qwen2"], MESHES[mesh]
    sizes, full = adapter_sizes(shape, LORA), {}
    for name, (rows, cols) in sizes.items():  # one rank that holds all
        full[name] = torch.full((rows, cols), float("nan"), dtype=torch.float64)
    everything = {f"{name}.adapter.": param for name, param in whole_tensors(sizes).items()}
    initial_adapters(everything, sizes, {f"{name}.adapter.": tensor for name, tensor in full.items()}, seed=5)
    for atlas in megatron_atlases(shape, spec, qkv_layout=qkv_layout).values():
        whole = with_adapters(atlas, LORA)
        held = {
            name: torch.full((p.rows, p.cols), float("nan"), dtype=torch.float64)
            for name, p in whole.items()
            if ".adapter." in name
        }
        initial_adapters(whole, sizes, held, seed=5)
        assert all(torch.equal(tensor, cut(whole, full, name)) for name, tensor in held.items())
    for name, tensor in full.items():
        if name.endswith("lora_B.weight"):
            assert not tensor.any()
        # kaiming_uniform_(a=sqrt(5)) of torch's Linear, and so of PEFT: U(-1 / sqrt(in), 1 / sqrt(in)),
        # variance 1 / (3 in)
        else:
            assert tensor.abs().max() <= tensor.shape[1] ** -0.5 and tensor.var() * 3 * tensor.shape[
                1
            ] == pytest.approx(1, abs=0.35)
    assert (
        len({float(tensor.sum()) for name, tensor in full.items() if "lora_A" in name})
        == 4 * shape.num_layers
    )  # each its own


def whole_tensors(sizes: Sizes) -> Atlas:
    return {
        name: LocalParam(rows, cols, (Piece(name, 0, rows, 0, cols, 0, 0),))
        for name, (rows, cols) in sizes.items()
    }


def test_transformer_engines_names_have_the_same_adapters():
    shape = SHAPES["qwen3_moe"]
    local, fused = (
        with_adapters(place_atlas(shape, MegatronPlace(), te_spec=te), LORA) for te in (False, True)
    )
    adapters = lambda atlas: {name: param for name, param in atlas.items() if ".adapter." in name}
    assert (
        adapters(local) == adapters(fused)
        and adapters(local)
        and not any("experts" in name for name in adapters(local))
    )

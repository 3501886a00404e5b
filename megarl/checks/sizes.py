"""Count the elements of a model that each rank holds, from the atlases (sharding specs) of single layers.

All layers of a kind are alike, so a mixture of 128 experts takes milliseconds."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import LoRAConfig
from megarl.reshard.alias import find_aliases
from megarl.reshard.atlas import Atlas, hf_atlas
from megarl.reshard.engine_atlas import OfRank, engine_atlas
from megarl.reshard.lora_atlas import with_adapters
from megarl.reshard.megatron_atlas import MegatronPlace, place_atlas

_LAYER = ("decoder.layers.", "model.layers.")


@dataclass(frozen=True, slots=True)
class Held:
    """Numbers of parameter elements of one model on a rank.

    Experts are separate, because optimizers shard them over other ranks than the rest."""

    dense: int = 0
    experts: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.adapters


def megatron_held(
    shape: ModelShape, mesh: MeshSpec, qkv_layout: str, lora: LoRAConfig | None = None
) -> dict[int, Held]:
    """Return rank -> numbers of elements of Megatron's parameters on it, the padded vocabulary included."""
    places = {rank: MegatronPlace.of(mesh, rank) for rank in mesh.ranks}

    @functools.cache  # pipeline stages have the same layers
    def layer(place: MegatronPlace, is_moe: bool) -> Held:
        return _layer_held(shape, place, is_moe, qkv_layout, lora)

    @functools.cache  # expert-parallel ranks have the same embedding and output layer
    def ends(place: MegatronPlace) -> int:
        return sum(param.rows * param.cols for param in _ends(shape, place, qkv_layout).values())

    def held_at(place: MegatronPlace) -> Held:
        dense, experts, adapters = ends(_without_experts(place)), 0, 0
        for is_moe, layers in _kinds_of_stage(shape, place).items():
            of_one = layer(_without_stages(place), is_moe)
            dense += layers * of_one.dense
            experts += layers * of_one.experts
            adapters += layers * of_one.adapters
        return Held(dense, experts, adapters)

    held = {place: held_at(place) for place in dict.fromkeys(places.values())}
    return {rank: held[place] for rank, place in places.items()}


def canonical_elements(shape: ModelShape) -> int:
    """Return the number of elements in the tensors of the Hugging Face folder."""
    return _model_elements(shape, hf_atlas)


def engine_held(shape: ModelShape, tp_size: int, backend: str = "vllm") -> int:
    """Return the number of elements of the parameters on one rank of an engine of --rollout-backend.

    For a model type without a table of the backend's layout this is a lower bound."""
    of_rank = engine_atlas(backend, shape)
    if of_rank is None:
        return canonical_elements(shape) // tp_size
    return _model_elements(shape, lambda one: of_rank(one, tp_size, 0))


def aliased_elements(
    shape: ModelShape, actor: MeshSpec, rollout: MeshSpec, qkv_layout: str, backend: str = "vllm"
) -> dict[int, int]:
    """Return rank -> number of elements of the engine's parameters that share the trainer's memory, for ranks
    with both.

    The dtypes must be equal for the memory to be shared."""
    of_rank = engine_atlas(backend, shape)
    if of_rank is None:
        return {}
    found = {}
    for index, rank in enumerate(rollout.ranks):
        if rank in actor.ranks:
            place = MegatronPlace.of(actor, rank)
            found[rank] = _aliased(shape, place, of_rank, rollout.tp, index % rollout.tp, qkv_layout)
    return found


def _layer_held(
    shape: ModelShape, place: MegatronPlace, is_moe: bool, qkv_layout: str, lora: LoRAConfig | None
) -> Held:
    """Return the numbers of elements of one layer on a rank."""
    sums: Counter[str] = Counter()
    atlas = _one_layer(shape, place, is_moe, qkv_layout)
    atlas = with_adapters(atlas, lora) if lora is not None and lora.lora_rank else atlas
    for name, param in atlas.items():
        if name.startswith(_LAYER):
            what = "adapters" if ".adapter." in name else "experts" if ".mlp.experts." in name else "dense"
            sums[what] += param.rows * param.cols
    return Held(**sums)


def _without_stages(place: MegatronPlace) -> MegatronPlace:
    return replace(place, pp_size=1, pp_rank=0, vpp_size=1)


def _without_experts(place: MegatronPlace) -> MegatronPlace:
    return replace(place, ep_size=1, ep_rank=0, etp_size=None, etp_rank=None)


def _kinds_of_stage(shape: ModelShape, place: MegatronPlace) -> Counter[bool]:
    """Return is_moe -> number of the layers of that kind in the rank's pipeline stage, over all its model
    chunks."""
    per_chunk = shape.num_layers // (place.pp_size * place.vpp_size)
    starts = [(chunk * place.pp_size + place.pp_rank) * per_chunk for chunk in range(place.vpp_size)]
    return Counter(shape.is_moe_layer(layer) for start in starts for layer in range(start, start + per_chunk))


def _of_one_layer(shape: ModelShape, is_moe: bool) -> ModelShape:
    return replace(shape, num_layers=1, dense_layers=() if is_moe or not shape.is_moe else (0,))


def _one_layer(shape: ModelShape, place: MegatronPlace, is_moe: bool, qkv_layout: str) -> Atlas:
    return place_atlas(_of_one_layer(shape, is_moe), _without_stages(place), qkv_layout=qkv_layout)


def _ends(shape: ModelShape, place: MegatronPlace, qkv_layout: str) -> Atlas:
    """Return the atlas (sharding spec) of the rank's parameters outside of layers: embedding, last norm and
    output layer."""
    short = replace(shape, num_layers=place.pp_size, dense_layers=(), num_moe_experts=0)
    atlas = place_atlas(short, replace(place, vpp_size=1), qkv_layout=qkv_layout)
    return {name: param for name, param in atlas.items() if not name.startswith(_LAYER)}


def _model_elements(shape: ModelShape, atlas_of) -> int:
    """Return the number of elements of all parameters on a rank. `atlas_of` gives the atlas (sharding spec)
    of a model with one layer."""
    kinds, total = Counter(shape.is_moe_layer(layer) for layer in range(shape.num_layers)), 0
    for index, (kind, layers) in enumerate(kinds.items()):
        for name, param in atlas_of(_of_one_layer(shape, kind)).items():
            times = layers if name.startswith(_LAYER) else index == 0
            total += times * param.rows * param.cols
    return total


def _aliased(
    shape: ModelShape,
    place: MegatronPlace,
    of_rank: OfRank,
    engine_tp: int,
    engine_rank: int,
    qkv_layout: str,
) -> int:
    total, kinds = 0, _kinds_of_stage(shape, place)
    for index, (kind, layers) in enumerate(kinds.items()):
        engine = of_rank(_of_one_layer(shape, kind), engine_tp, engine_rank)
        ends = _ends(shape, place, qkv_layout)
        mine = {
            name: param
            for name, param in _one_layer(shape, place, kind, qkv_layout).items()
            if name.startswith(_LAYER)
        } | ends
        for name in find_aliases(mine, engine):
            total += (
                (layers if name.startswith(_LAYER) else index == 0) * engine[name].rows * engine[name].cols
            )
    return total

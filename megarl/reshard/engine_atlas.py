"""Look up the sharding spec of an inference engine (its atlas) by the engine's backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.config.hf_config import ModelShape
from megarl.reshard import transformers_atlas, vllm_atlas
from megarl.reshard.atlas import Atlas

OfRank = Callable[[ModelShape, int, int], Atlas]
"""(shape, ranks of the engine, number of the rank in the engine) -> what the rank holds."""
_ATLASES: dict[str, tuple[Callable[[ModelShape], bool], OfRank]] = {
    "vllm": (lambda shape: shape.model_type in vllm_atlas.TABLES, vllm_atlas.vllm_atlas),
    "transformers": (lambda shape: True, transformers_atlas.transformers_atlas),
}
"""--rollout-backend -> (whether there is a table for a model, the atlas of a rank by that table)."""


def engine_atlas(backend: str, shape: ModelShape) -> OfRank | None:
    """Return the function that computes the atlas (sharding spec) of a rank of an engine.

    Returns: None if only the engine itself can tell, after it has started."""
    has_table, of_rank = _ATLASES[backend]
    return of_rank if has_table(shape) else None


def engine_atlases(
    backend: str, shape: ModelShape, ranks: Sequence[int], tp_size: int
) -> dict[int, Atlas] | None:
    """Return rollout rank -> its atlas (sharding spec). Engines are consecutive blocks of tp_size ranks.

    Returns: None if only the engines themselves can tell, after they have started."""
    of_rank = engine_atlas(backend, shape)
    if of_rank is None:
        return None
    of_tp_rank = [of_rank(shape, tp_size, tp_rank) for tp_rank in range(tp_size)]
    return {rank: of_tp_rank[index % tp_size] for index, rank in enumerate(ranks)}

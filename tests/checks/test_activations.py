"""The estimate of activations against what autograd keeps for Megatron's layers, on CPU ranks.

pytest tests/checks/test_activations.py

The tolerance is what the estimate leaves out: one number per head and token of norms and of attention (with
heads of 20 to 40, as here, below 1 % of a layer; of published models a quarter of that), rotary frequencies,
and what DeepSeek's router keeps of its groups."""

import json
from pathlib import Path

import pytest

from megarl.checks.activations import layer_bytes, stage_bytes
from megarl.config.hf_config import ModelShape
from tests.checks.activation_cases import (
    CASES,
    MODELS,
    NUM_TOKENS,
    SAMPLE_TOKENS,
    mesh_of,
    name_of,
    parallel_of_case,
)
from tests.launch import torchrun

TOLERANCE = 0.01
OF_BF16 = 0.03
"""On a CPU norms of queries and keys keep more in fp32 than is counted."""
OF_CONTEXT_PARALLELISM = 0.1
"""On a CPU context parallelism gathers the keys and values of whole sequences, and makes masks."""
FREQUENCIES = 4 * 24 * SAMPLE_TOKENS
"""Bytes of rotary frequencies, which a model keeps once: much of what fully recomputed layers keep."""


def measured(folder: Path, which: str) -> dict[str, float]:
    """Return case -> bytes that a rank keeps: the mean, as experts do not get equally many tokens."""
    torchrun(2, Path(__file__).with_name("run_activations.py"), folder, which, timeout=300)
    ranks = [json.loads((folder / f"report_{rank}.json").read_text()) for rank in range(2)]
    kept = {case: [rank[case] for rank in ranks if rank[case] is not None] for case in ranks[0]}
    return {case: sum(of_ranks) / len(of_ranks) for case, of_ranks in kept.items()}


def estimated(folder: Path, model: str, layout: str, bf16: bool) -> int:
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    shape, parallel, mesh = ModelShape.load(folder), parallel_of_case(layout), mesh_of(layout)
    layers = [
        layer_bytes(shape.of_layer(layer), parallel, mesh, bf16, on_cpu=True, longest=SAMPLE_TOKENS)
        for layer in range(shape.num_layers)
    ]
    return NUM_TOKENS // mesh.cp * stage_bytes(layers, shape, parallel, mesh, bf16)


@pytest.mark.parametrize("which", ["default", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_layers_keep_what_is_estimated(tmp_path, which):
    of_ranks = measured(tmp_path, which)
    wrong = {}
    for case in CASES[which]:
        kept, found = of_ranks[name_of(*case)], estimated(tmp_path, *case)
        tolerance = OF_CONTEXT_PARALLELISM if "cp2" in case[1] else OF_BF16 if case[2] else TOLERANCE
        if abs(found - kept) > max(tolerance * kept, FREQUENCIES):
            wrong[name_of(*case)] = (found, kept)
    assert wrong == {} and len(of_ranks) == len(CASES[which])

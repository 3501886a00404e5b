"""Run under torchrun: what each model of activation_cases.py keeps for its backward pass, in bytes, for
test_activations.py.

    torchrun --nproc-per-node 2 tests/checks/run_activations.py OUT_FOLDER default
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2]))
from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.schema import ModelConfig, OptimizerConfig
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.workers.worker import join_world
from tests.checks.activation_cases import (
    CASES,
    MODELS,
    NUM_SAMPLES,
    SAMPLE_TOKENS,
    mesh_of,
    name_of,
    parallel_of_case,
)


class Kept:
    """The tensors that autograd keeps for the layers of a model, without those of the last norm.

    A storage is counted once, and not if it is a parameter's. It is counted when the layers have run: by then
    that of a recomputed tensor is empty."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.is_counting, self.storages = model, False, {}
        self.bytes: int | None = None
        """What is kept when the layers have run for the first time."""
        for module, inside in ((model.decoder, True), (model.decoder.final_layernorm, False)):
            module.register_forward_pre_hook(lambda *_, inside=inside: self._count(inside))
            module.register_forward_hook(lambda *_, inside=inside: self._count(not inside))
        model.decoder.register_forward_hook(lambda *_: self._add_up())

    def _count(self, yes: bool) -> None:
        self.is_counting = yes

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_counting:
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = storage
        return tensor

    def _add_up(self) -> None:
        if self.bytes is None:
            own = {p.untyped_storage()._cdata for p in self.model.parameters()}
            self.bytes = sum(s.nbytes() for key, s in self.storages.items() if key not in own)
            self.storages.clear()


class Held(Policy):
    """A policy that makes no optimizer step."""

    def step(self, check: object = None) -> dict[str, float]:
        return {}


def measure(folder: Path, model: str, layout: str, bf16: bool) -> int | None:
    """Return the bytes that this rank keeps for an update, None if it is not one of the layout's."""
    folder = folder / f"{model}_{dist.get_rank()}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    mesh = mesh_of(layout)
    create_groups(mesh)
    if dist.get_rank() not in mesh.ranks:
        return None
    shape = ModelShape.load(folder)
    policy = Held(
        shape,
        mesh,
        ModelConfig(model=str(folder), bf16=bf16),
        parallel_of_case(layout),
        OptimizerConfig(use_distributed_optimizer=False),
    )
    generator = torch.Generator().manual_seed(7)
    for name, parameter in policy.parameters.items():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 + ("norm" in name))
    ids = torch.randint(0, shape.vocab_size, (NUM_SAMPLES, SAMPLE_TOKENS), generator=generator).tolist()
    batch = Batch.from_samples(list(range(NUM_SAMPLES)), [i[:9] for i in ids], [i[9:] for i in ids])
    (model_of_rank,) = policy.chunks
    kept = Kept(model_of_rank)

    def loss(micro, log_probs, entropy, rows):
        value = -log_probs.sum()
        return value, {"loss": value.detach()}

    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        policy.update([MicroBatch.of(batch)], loss, 1.0, token_level=False)
    return kept.bytes


def main(out: Path, which: str) -> None:
    join_world(60)
    report = {name_of(*case): measure(out, *case) for case in CASES[which]}
    (out / f"report_{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

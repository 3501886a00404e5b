"""Run under torchrun with 4 ranks: two updates of every case of layouts.py, against one rank of the same job.

Every rank cuts what it should hold out of the reference's full tensors, by its atlas, and compares: all copies are seen and
nothing is gathered. Writes report_<rank>.json for test_equivalence.py; names of cases as arguments run those alone.

    torchrun --nproc-per-node 4 tests/megatron/run_equivalence.py OUT_FOLDER [tp2_sp/actor/packed ...]"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from layouts import CASES, LAYOUTS, MODELS, MUTANTS, PACKINGS, Layout

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import megatron_mesh
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.megatron.trained_model import TrainedModel
from megarl.megatron.value_model import ValueModel
from megarl.packing import MiniBatch, Sample, plan_mini_batches
from megarl.reshard.atlas import Atlas, hf_sizes
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.workers.worker import join_world

Tensors = dict[str, torch.Tensor]


def full_weights(shape: ModelShape) -> Tensors:
    """Away from 1 and 0, so that a norm or bias that is not loaded shows."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, cols, generator=generator) * (0.2 if cols == 1 else 0.1) + ("norm" in name)
            for name, (rows, cols) in hf_sizes(shape).items()}  # fmt: skip


def make_batch(vocab_size: int, count: int = 12) -> Batch:
    """Prompts of 1 to 24 tokens, responses of 1 to 16: ranks that have equally much to do have unequal numbers of response tokens."""
    generator = torch.Generator().manual_seed(3)

    def ids(high: int) -> list[int]:
        return torch.randint(0, vocab_size, (int(torch.randint(1, high, (1,), generator=generator)),), generator=generator).tolist()

    batch = Batch.from_samples(list(range(count)), [ids(25) for _ in range(count)], [ids(17) for _ in range(count)])
    # of mean 1: a loss near 0 would have no relative precision
    batch.advantages = (1 + torch.randn(len(batch.tokens), generator=generator)) * batch.response_mask
    return batch


def rectangles(atlas: Atlas, local: Tensors, full: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name of the canonical tensor, what this rank holds of it and the same of `full`, both as views."""
    for name, param in atlas.items():
        for piece in param.pieces:
            part = full[piece.hf_name][piece.row_start : piece.row_end, piece.col_start : piece.col_end]
            rows, cols = part.shape
            yield piece.hf_name, local[name][piece.local_row : piece.local_row + rows, piece.local_col : piece.local_col + cols], part


def worst(atlas: Atlas, local: Tensors, full: Tensors, relative: bool) -> tuple[float, str]:
    """Largest difference and where it is; relative to the largest element of the canonical tensor, or absolute."""
    return max(((mine - wanted).abs().max().item() / (full[name].abs().max().item() if relative else 1.0), name)
               for name, mine, wanted in rectangles(atlas, local, full))  # fmt: skip


def build(folder: Path, layout: Layout, role: str) -> tuple[TrainedModel, Atlas]:
    """With the same full weights in every layout."""
    parallel = ParallelConfig(**layout.parallel)
    mesh, shape = megatron_mesh(tuple(range(layout.ranks)), parallel), ModelShape.load(folder / layout.model, value_head=role == "critic")
    # eps 1e-5: with 1e-8 a gradient that is only rounding noise becomes an update as large as the learning rate
    optimizer = OptimizerConfig(lr=1e-2, clip_grad=0.5, adam_eps=1e-5, **layout.optimizer)
    model = (ValueModel if role == "critic" else Policy)(shape, mesh, ModelConfig(model=layout.model, bf16=layout.bf16), parallel, optimizer)
    atlas = megatron_atlases(shape, mesh, qkv_layout=parallel.qkv_layout)[dist.get_rank()]
    for parameter in model.parameters.values():
        parameter.zero_()
    for _, mine, wanted in rectangles(atlas, model.parameters, full_weights(shape)):
        mine.copy_(wanted)
    model.parameters_changed()
    return model, atlas


def plan(model: TrainedModel, batch: Batch, max_tokens: int) -> MiniBatch:
    samples = [Sample(i, int(n), int(r)) for i, (n, r) in enumerate(zip(batch.lengths, batch.response_lengths))]
    (mini_batch,) = plan_mini_batches(samples, len(samples), {}, model.mesh.dp, max_tokens, 64, "a")
    return mini_batch


def update(model: TrainedModel, micros: list[MicroBatch], num_tokens: int, token_level: bool) -> dict[str, float]:
    def policy_loss(micro, log_probs, entropy, rows):
        value = -(log_probs * micro.column("advantages")[rows] + 0.01 * entropy).sum() / num_tokens
        return value, {"loss": value.detach()}

    def value_loss(micro, values):
        value = 0.5 * (values - micro.column("advantages")).square().sum() / num_tokens
        return value, {"loss": value.detach()}

    model.advance_schedule()
    if isinstance(model, ValueModel):
        return model.update(micros, value_loss)
    return model.update(micros, policy_loss, temperature=0.8, with_entropy=True, token_level=token_level)


def gradients_at_step(model: TrainedModel) -> Tensors:
    """Filled with the gradients of the next update when its optimizer steps: summed over ranks, not clipped.

    Of a distributed optimizer too: on a CPU its reduce-scatter leaves the whole sum (cpu_shim)."""
    gradients: Tensors = {}

    def step():
        del model.step
        gradients.update((name, p.main_grad.view(p.shape[0], -1).clone()) for name, p in model.named_parameters())
        return model.step()

    model.step = step
    return gradients


def run(folder: Path, layout: Layout, role: str, packing: str, mutant: str = "") -> tuple[dict, TrainedModel, Atlas, Tensors]:
    """Two updates -> (this rank's loss and gradient norm of each, the model, its atlas, the gradients of the first)."""
    (model, atlas), batch = build(folder, layout, role), make_batch(MODELS[layout.model]["vocab_size"])
    mini_batch = plan(model, batch, PACKINGS[packing])
    micros = [MicroBatch.of(batch.select_samples(ids)) for ids in mini_batch.micro_batches[model.groups.dp.rank()]]
    num_tokens = mini_batch.num_tokens
    if mutant == "local_token_count":
        num_tokens = model.mesh.dp * sum(len(micro.targets) for micro in micros)
    elif mutant == "unmarked_norms":
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.sequence_parallel = False
    gradients, report = gradients_at_step(model), {"tokens": [len(micro.targets) for micro in micros], "loss": [], "grad_norm": []}
    for _ in range(2):
        metrics = update(model, micros, num_tokens, token_level=packing == "packed")
        report["loss"].append(metrics.get("loss", 0.0))
        report["grad_norm"].append(metrics.get(f"{model.prefix}/grad_norm", 0.0))
    return report, model, atlas, gradients


def write_reference(folder: Path, path: Path, layout: Layout, role: str) -> None:
    """What one rank without splits does with packed micro-batches: full tensors by canonical name."""
    report, model, atlas, gradients = run(folder, Layout(model=layout.model, bf16=layout.bf16), role, "packed")
    start, found = full_weights(model.shape), {"report": report}
    for kind, local in (("gradients", gradients), ("weights", {name: p.float() for name, p in model.parameters.items()})):
        found[kind] = {name: torch.full_like(tensor, float("nan")) for name, tensor in start.items()}
        for _, mine, out in rectangles(atlas, local, found[kind]):
            out.copy_(mine)
    for name, weight in found["weights"].items():
        assert found["gradients"][name].any() and (weight - start[name]).abs().max() > 1e-3, f"{name} was not trained"
    torch.save(found, path)


def compare(folder: Path, reference: Path, layout: Layout, role: str, packing: str, mutant: str = "") -> dict:
    """The report of this rank, with its differences from one rank."""
    report, model, atlas, gradients = run(folder, layout, role, packing, mutant)
    wanted = torch.load(reference)
    report["one_rank"] = wanted["report"]
    report["gradient"] = worst(atlas, gradients, wanted["gradients"], relative=True)
    report["weight"] = worst(atlas, {name: p.float() for name, p in model.parameters.items()}, wanted["weights"], relative=False)
    return report


def main(out: Path, *only: str) -> None:
    join_world(60)
    rank, report = dist.get_rank(), {}
    cases = [(*case, "") for case in CASES] + [(layout, "actor", "packed", mutant) for mutant, layout in MUTANTS.items()]
    cases = [case for case in cases if not only or "/".join(filter(None, case)) in only]
    for layout, *_ in cases:
        create_groups(megatron_mesh(tuple(range(LAYOUTS[layout].ranks)), ParallelConfig(**LAYOUTS[layout].parallel)))
    create_groups(megatron_mesh((0,), ParallelConfig()))
    references = {(of.model, role, of.bf16): (of, out / f"{of.model}_{role}_{of.bf16}.pt") for name, role, *_ in cases for of in [LAYOUTS[name]]}
    if rank == 0:
        for name, config in MODELS.items():
            (out / name).mkdir(exist_ok=True)
            (out / name / "config.json").write_text(json.dumps(config))
        for (_, role, _), (layout, path) in references.items():
            write_reference(out, path, layout, role)
    dist.barrier()
    for name, role, packing, mutant in cases:
        layout = LAYOUTS[name]
        if rank < layout.ranks:
            _, reference = references[layout.model, role, layout.bf16]
            report["/".join(filter(None, (name, role, packing, mutant)))] = compare(out, reference, layout, role, packing, mutant)
    (out / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

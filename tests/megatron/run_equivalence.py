"""Run under torchrun with 4 ranks: a forward pass and two updates of every case of layouts.py, against one
rank of the same job.

Every rank cuts what it should hold out of the reference's full tensors, by its atlas, and compares: all
copies are seen and nothing is gathered. Writes report_<rank>.json for test_equivalence.py.

    torchrun --nproc-per-node 4 tests/megatron/run_equivalence.py OUT_FOLDER [tp2_sp/actor/packed ...]     # default: all cases"""

from __future__ import annotations

import contextlib
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from layouts import CASES, LAYOUTS, MODELS, PACKINGS, PLANTED, Layout

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import megatron_mesh
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.megatron import fsdp
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.megatron.trained_model import TrainedModel
from megarl.megatron.value_model import ValueModel
from megarl.packing import MiniBatch, Sample, plan_mini_batches
from megarl.reshard.atlas import KEPT_IN_FP32, Atlas, hf_sizes
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.workers.worker import join_world

Tensors = dict[str, torch.Tensor]


def full_weights(shape: ModelShape) -> Tensors:
    """Away from 1 and 0, so that a norm or bias that is not loaded shows."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(rows, cols, generator=generator) * (0.2 if cols == 1 else 0.1)
        + ("norm" in name and not shape.zero_centered_norms)
        for name, (rows, cols) in hf_sizes(shape).items()
    }


def make_batch(vocab_size: int, count: int = 9) -> Batch:
    """Prompts of 1 to 24 tokens, responses of 1 to 16: ranks that have equally much to do have unequal
    numbers of response tokens."""
    generator = torch.Generator().manual_seed(3)

    def ids(high: int) -> list[int]:
        return torch.randint(
            0, vocab_size, (int(torch.randint(1, high, (1,), generator=generator)),), generator=generator
        ).tolist()

    batch = Batch.from_samples(
        list(range(count)), [ids(25) for _ in range(count)], [ids(17) for _ in range(count)]
    )
    # of mean 1: a loss near 0 would have no relative precision
    batch.advantages = (1 + torch.randn(len(batch.tokens), generator=generator)) * batch.response_mask
    return batch


def rectangles(
    atlas: Atlas, local: Tensors, full: Tensors
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name of the canonical tensor, what this rank holds of it and the same of `full`, both as views."""
    for name, param in atlas.items():
        for piece in param.pieces:
            part = full[piece.hf_name][piece.row_start : piece.row_end, piece.col_start : piece.col_end]
            rows, cols = part.shape
            yield (
                piece.hf_name,
                local[name][
                    piece.local_row : piece.local_row + rows, piece.local_col : piece.local_col + cols
                ],
                part,
            )


def having(atlas: Atlas, local: Tensors) -> Atlas:
    """Corrections of routers' scores have no gradient."""
    return {name: param for name, param in atlas.items() if name in local}


def distance(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference; infinite if one is no number."""
    return (mine.cpu() - wanted.cpu()).abs().max().nan_to_num(nan=torch.inf).item()


def worst(atlas: Atlas, local: Tensors, full: Tensors, relative: bool) -> tuple[float, str]:
    """Largest difference and where it is; relative to the largest element of the canonical tensor, or
    absolute."""
    return max(
        (
            (distance(mine, wanted) / (full[name].abs().max().item() if relative else 1.0), name)
            for name, mine, wanted in rectangles(atlas, local, full)
        ),
        default=(0.0, "no tensor"),
    )


def checksums(atlas: Atlas, local: Tensors) -> dict[str, int]:
    """Of every rectangle of a canonical tensor that this rank holds. Ranks that hold the same one have copies
    of it."""
    return {
        f"{piece.hf_name}[{piece.row_start}:{piece.row_end}, {piece.col_start}:{piece.col_end}]": zlib.crc32(
            local[name][piece.local_row :, piece.local_col :][
                : piece.row_end - piece.row_start, : piece.col_end - piece.col_start
            ]
            .contiguous()
            .numpy()
        )
        for name, param in atlas.items()
        for piece in param.pieces
    }


def build(folder: Path, layout: Layout, role: str) -> tuple[TrainedModel, Atlas]:
    """With the same full weights in every layout."""
    parallel = ParallelConfig(**layout.parallel)
    mesh, shape = (
        megatron_mesh(tuple(range(layout.ranks)), parallel),
        ModelShape.load(folder / layout.model, value_head=role == "critic"),
    )
    # eps 1e-5: with 1e-8 a gradient that is only rounding noise becomes an update as large as the learning
    # rate
    optimizer = OptimizerConfig(lr=1e-2, clip_grad=0.5, adam_eps=1e-5, **layout.optimizer)
    model = (ValueModel if role == "critic" else Policy)(
        shape, mesh, ModelConfig(model=layout.model, bf16=layout.bf16), parallel, optimizer
    )
    atlas = megatron_atlases(shape, mesh, qkv_layout=parallel.qkv_layout)[dist.get_rank()]
    for parameter in model.parameters.values():
        parameter.zero_()
    num_elements = sum(parameter.numel() for _, parameter in model.named_parameters())
    held = {part: model.memory.resident_bytes(part) / num_elements for part in ("parameters", "gradients")}
    shards = (
        mesh.cp * mesh.dp
        if layout.optimizer.get("use_megatron_fsdp")
        and optimizer.data_parallel_sharding_strategy == "optim_grads"
        else 1
    )
    assert held["parameters"] >= (2 if layout.bf16 else 4) and held["gradients"] >= 4 / shards, (
        f"{held} bytes per element can be offloaded"
    )
    assert shards == 1 or held["gradients"] < 4.5 / shards, (
        f"{held} bytes per element: gradients are not sharded"
    )
    for _, mine, wanted in rectangles(atlas, model.parameters, full_weights(shape)):
        mine.copy_(wanted)
    model.parameters_changed()
    return model, atlas


@contextlib.contextmanager
def message_under_way(layout: Layout) -> Iterator[None]:
    """Between ranks 0 and 1, over the world: whatever a layout sent there itself would arrive in this one's
    place."""
    received, between = torch.zeros(1), layout.ranks > 1
    pending = dist.irecv(received, src=1) if between and dist.get_rank() == 0 else None
    yield
    if between and dist.get_rank() == 1:
        dist.send(torch.ones(1), dst=0)
    if pending is not None:
        pending.wait()
        assert received == 1


def plan(model: TrainedModel, batch: Batch, max_tokens: int) -> MiniBatch:
    samples = [
        Sample(i, int(n), int(r)) for i, (n, r) in enumerate(zip(batch.lengths, batch.response_lengths))
    ]
    (mini_batch,) = plan_mini_batches(samples, len(samples), {}, model.mesh.dp, max_tokens, 64, "a")
    return mini_batch


def update(
    model: TrainedModel, micros: list[MicroBatch], num_tokens: int, token_level: bool
) -> dict[str, float]:
    def policy_loss(micro, log_probs, entropy, rows):
        value = (
            -(log_probs * micro.column("advantages")[rows].to(log_probs.device) + 0.01 * entropy).sum()
            / num_tokens
        )
        return value, {"loss": value.detach()}

    def value_loss(micro, values):
        value = 0.5 * (values - micro.column("advantages").to(values.device)).square().sum() / num_tokens
        return value, {"loss": value.detach()}

    model.advance_schedule()
    if isinstance(model, ValueModel):
        return model.update(micros, value_loss)
    return model.update(micros, policy_loss, temperature=0.8, with_entropy=True, token_level=token_level)


def forward_only(model: TrainedModel, micros: list[MicroBatch]) -> dict[int, torch.Tensor]:
    """Log-probs or values of the response tokens by sample id; {} before the last stage."""
    outputs = (
        model.values(micros) if isinstance(model, ValueModel) else model.log_probs(micros, temperature=0.8)
    )
    if outputs is None:
        return {}
    ids, lengths = (
        torch.cat([m.batch.sample_ids for m in micros]),
        torch.cat([m.batch.response_lengths for m in micros]),
    )
    return dict(zip(ids.tolist(), torch.cat(outputs).split(lengths.tolist()), strict=True))


def gradients_at_step(model: TrainedModel) -> Tensors:
    """Filled with the gradients of the next update when its optimizer steps: summed over ranks, not clipped.

    Of a distributed optimizer over several ranks on a CPU only, where its reduce-scatter leaves the whole sum
    (megarl/megatron/fixes.py). NCCL's leaves each rank its part, and nothing is returned."""
    gradients: Tensors = {}
    if model.device.type == "cuda" and model.groups.dp_cp.size() > 1:
        if any(part.ddp_config.use_distributed_optimizer for part in model.ddp):
            return gradients

    def step(check=None):
        del model.step
        whole = (
            gathered_gradients(model)
            if model.sharded
            else ((name, p.main_grad.clone().cpu()) for name, p in model.named_parameters())
        )
        gradients.update((name, gradient.view(len(gradient), -1)) for name, gradient in whole)
        return model.step(check)

    model.step = step
    return gradients


def gathered_gradients(model: TrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron-FSDP leaves each data-parallel rank a stretch of every gradient."""
    (ddp,), group = model.sharded, model.groups.dp_cp
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, _, shard in ddp.optimized():
        parts = [torch.empty(0)] * group.size()
        dist.all_gather_object(
            parts, torch.empty(0) if shard.grad is None else shard.grad._local_tensor.flatten(), group=group
        )
        yield names[parameter], torch.cat(parts).view(parameter.shape)


def own_part(out: torch.Tensor, of_ranks: torch.Tensor, group: dist.ProcessGroup) -> None:
    """A reduce-scatter without the sum."""
    out.copy_(of_ranks.chunk(group.size())[group.rank()])


@dataclass
class Run:
    """What one rank has of a forward pass and two updates that follow it.

    Args:
        report: its response tokens per micro-batch, and of each update its part of the loss and of the
            gradient norm.
        outputs: of the forward pass, by sample id.
        gradients: of the first update."""

    model: TrainedModel
    atlas: Atlas
    report: dict[str, list]
    outputs: dict[int, torch.Tensor]
    gradients: Tensors

    @property
    def weights(self) -> Tensors:
        return {name: p.float().cpu() for name, p in self.model.parameters.items()}


def run(folder: Path, layout: Layout, role: str, packing: str, mutant: str = "") -> Run:
    (model, atlas), batch = build(folder, layout, role), make_batch(MODELS[layout.model]["vocab_size"])
    mini_batch = plan(model, batch, PACKINGS[packing])
    micros = [
        MicroBatch.of(batch.select_samples(ids)) for ids in mini_batch.micro_batches[model.groups.dp.rank()]
    ]
    num_tokens = mini_batch.num_tokens
    if mutant == "local_token_count":
        num_tokens = model.mesh.dp * sum(len(micro.targets) for micro in micros)
    elif mutant == "unmarked_norms":
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.sequence_parallel = False
    outputs, gradients = forward_only(model, micros), gradients_at_step(model)
    report = {"tokens": [len(micro.targets) for micro in micros], "loss": [], "grad_norm": []}
    with (
        patch.object(dist, "reduce_scatter_tensor", own_part)
        if mutant == "own_key_gradient"
        else contextlib.nullcontext()
    ):
        for _ in range(2):
            metrics = update(model, micros, num_tokens, token_level=packing == "packed")
            report["loss"].append(metrics.get("loss", 0.0))
            report["grad_norm"].append(metrics.get(f"{model.prefix}/grad_norm", 0.0))
    return Run(model, atlas, report, outputs, gradients)


def write_reference(folder: Path, path: Path, layout: Layout, role: str) -> None:
    """What one rank without splits does with packed micro-batches: full tensors by canonical name."""
    one = run(folder, Layout(model=layout.model, bf16=layout.bf16), role, "packed")
    start, found = full_weights(one.model.shape), {"report": one.report, "outputs": one.outputs}
    for kind, local in (("gradients", one.gradients), ("weights", one.weights)):
        found[kind] = {name: torch.full_like(tensor, float("nan")) for name, tensor in start.items()}
        for _, mine, out in rectangles(having(one.atlas, local), local, found[kind]):
            out.copy_(mine)
    for name, weight in found["weights"].items():
        if name.endswith(KEPT_IN_FP32):
            assert torch.equal(weight, start[name]), f"{name} is not frozen"
        else:
            assert found["gradients"][name].any() and (weight - start[name]).abs().max() > 1e-3, (
                f"{name} was not trained"
            )
    torch.save(found, path)


def compare(folder: Path, layout: Layout, reference: Path, role: str, packing: str, mutant: str = "") -> dict:
    """The report of this rank, with its differences from one rank."""
    with message_under_way(layout):
        mine = run(folder, layout, role, packing, mutant)
    wanted = torch.load(reference)
    outputs = [
        (distance(output, wanted["outputs"][sample]), f"sample {sample}")
        for sample, output in mine.outputs.items()
    ]
    return mine.report | {
        "one_rank": wanted["report"],
        "output": max(outputs, default=(0.0, "no sample")),
        "gradient": worst(
            having(mine.atlas, mine.gradients), mine.gradients, wanted["gradients"], relative=True
        ),
        "weight": worst(mine.atlas, mine.weights, wanted["weights"], relative=False),
        "copies": checksums(mine.atlas, mine.weights),
    }


def main(out: Path, *cases: str) -> None:
    join_world(60)
    fsdp.BUCKET_ELEMENTS = 20_000  # several buckets
    rank, arguments, references = dist.get_rank(), {}, {}
    for case in cases or CASES + PLANTED:
        name, role, *how = case.split("/")
        layout = LAYOUTS[name]
        path = out / f"{layout.model}_{role}_{layout.bf16}.pt"
        references[path] = layout, role
        arguments[case] = layout, path, role, *how
        create_groups(megatron_mesh(tuple(range(layout.ranks)), ParallelConfig(**layout.parallel)))
    create_groups(megatron_mesh((0,), ParallelConfig()))
    if rank == 0:
        for name, config in MODELS.items():
            (out / name).mkdir(exist_ok=True)
            (out / name / "config.json").write_text(json.dumps(config))
        for path, (layout, role) in references.items():
            write_reference(out, path, layout, role)
    dist.barrier()
    report = {case: compare(out, *of_case) for case, of_case in arguments.items() if rank < of_case[0].ranks}
    (out / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

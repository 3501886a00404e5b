"""Run under torchrun with 2 ranks: families in layouts of families.py against transformers. Writes
JSON reports and the folders of the round trips for test_families.py.

    torchrun --nproc-per-node 2 tests/megatron/run_families.py OUT_FOLDER gemma3/one gemma3/tp2"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from families import FAULTS, config

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.hf_weights import load_hf, save_hf
from megarl.workers.worker import join_world

TEMPERATURE = 0.8
MESHES = {
    "one": MeshSpec((0,)),
    "tp2": MeshSpec((0, 1), tp=2),
    "tp2_sp": MeshSpec((0, 1), tp=2),
    "pp2": MeshSpec((0, 1), pp=2),
    "tp2_stacked": MeshSpec((0, 1), tp=2),
    "ep2": MeshSpec((0, 1), ep=2),
    "tp2_sp_ep2": MeshSpec((0, 1), tp=2, ep=2, etp=1),
}


def parallel(layout: str) -> ParallelConfig:
    mesh = MESHES[layout]
    return ParallelConfig(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.etp,
        sequence_parallel="sp" in layout,
        qkv_layout="stacked" if "stacked" in layout else "grouped",
    )


def make_folder(folder: Path, name: str) -> None:
    """A random model, a batch for it, and what transformers computes of them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    randomise(model, name)
    model.save_pretrained(folder)
    batch = make_batch(model.config.vocab_size)
    torch.save(reference(model, batch), folder / "reference.pt")


@torch.no_grad()
def randomise(model, family: str) -> None:
    """Weights away from 1 and 0, so that a norm or bias that is not loaded shows."""
    corrections = [
        (name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")
    ]
    for name, p in [*model.named_parameters(), *corrections]:
        norm, bias = "norm" in name, "bias" in name
        p.normal_(
            (0.3 if "gemma" in family else 1.0) if norm else 0.0, 0.2 if norm or bias else 0.1
        )  # Gemma's multiply by 1 + weight


def make_batch(vocab_size: int, count: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(3)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, vocab_size, (length,), generator=generator).tolist()

    return Batch.from_samples(
        list(range(count)), [ids(1, 13) for _ in range(count)], [ids(1, 25) for _ in range(count)]
    )


@torch.no_grad()
def reference(model, batch: Batch) -> dict[str, torch.Tensor]:
    """By transformers, one unpadded sequence at a time: logits [T, V]; log_probs [T], 0 but at response
    tokens."""
    logits, log_probs = [], torch.zeros(len(batch.tokens))
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        tokens = batch.tokens[start:end]
        logits.append(model(tokens[None]).logits[0])
        of_sample = F.log_softmax(logits[-1] / TEMPERATURE, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        log_probs[start + 1 : end] = of_sample
    return {"logits": torch.cat(logits), "log_probs": log_probs * batch.response_mask}


def build(folder: Path, layout: str, fault: dict[str, object] | None = None) -> tuple[Policy, dict]:
    """`fault`: what to believe of the model, in place of what its config.json says."""
    mesh, split, shape = (
        MESHES[layout],
        parallel(layout),
        dataclasses.replace(ModelShape.load(folder), **(fault or {})),
    )
    policy = Policy(shape, mesh, ModelConfig(model=str(folder), bf16=False), split)
    atlases = megatron_atlases(shape, mesh, qkv_layout=split.qkv_layout)
    load_hf(folder, atlases[dist.get_rank()], policy.parameters, shape)
    policy.parameters_changed()
    return policy, atlases


def micro_batches(policy: Policy, batch: Batch) -> list[MicroBatch]:
    """Two, of this data-parallel rank's samples."""
    mine = range(policy.groups.dp.rank(), len(batch), policy.groups.dp.size())
    return [MicroBatch.of(batch.select_samples(mine[i::2])) for i in range(2)]


def log_prob_error(
    policy: Policy, micros: list[MicroBatch], batch: Batch, expected: torch.Tensor
) -> float | None:
    """The largest of this rank's; None before the last stage."""
    log_probs = policy.log_probs(micros, TEMPERATURE)
    if log_probs is None:
        return None
    errors = [
        (got - at(expected, batch, micro)[micro.batch.response_mask]).abs().max()
        for got, micro in zip(log_probs, micros, strict=True)
    ]
    return float(torch.stack(errors).max())


def at(column: torch.Tensor, batch: Batch, micro: MicroBatch) -> torch.Tensor:
    """The rows of a column of the batch that are the micro-batch's tokens."""
    cu_seqlens = batch.cu_seqlens.tolist()
    return torch.cat([column[cu_seqlens[i] : cu_seqlens[i + 1]] for i in micro.batch.sample_ids.tolist()])


@torch.no_grad()
def logits_error(policy: Policy, micros: list[MicroBatch], batch: Batch, expected: torch.Tensor) -> float:
    """Of the whole [T, V] logits at every token, prompts too. One rank: the decoder's output meets the whole
    output layer."""
    hidden, (model,) = [], policy.chunks
    hook = model.decoder.register_forward_hook(lambda module, arguments, output: hidden.append(output[:, 0]))
    policy.log_probs(micros, TEMPERATURE)
    hook.remove()
    layer = model.embedding.word_embeddings if policy.shape.tie_word_embeddings else model.output_layer
    weight = layer.weight[: policy.shape.vocab_size]
    return max(
        float((h @ weight.t() - at(expected, batch, micro)).abs().max())
        for h, micro in zip(hidden, micros, strict=True)
    )


def main(out: Path, *cases: str) -> None:
    layouts: dict[str, list[str]] = {}
    for name, _, layout in (case.partition("/") for case in cases):
        layouts.setdefault(name, []).append(layout)
    rank, report, names = int(os.environ["RANK"]), {}, [*layouts]
    # before the world is there: in one, transformers writes on rank 0 only
    for name in names[rank :: int(os.environ["WORLD_SIZE"])]:
        make_folder(out / name, name)
    join_world(60)
    for mesh in MESHES.values():
        create_groups(mesh)
    dist.barrier()
    for name in names:
        expected, batch = torch.load(out / name / "reference.pt"), make_batch(config(name).vocab_size)
        for layout in layouts[name]:
            if rank not in MESHES[layout].ranks:
                continue
            policy, atlases = build(out / name, layout)
            micros = micro_batches(policy, batch)
            case = report[f"{name}/{layout}"] = {
                "log_probs": log_prob_error(policy, micros, batch, expected["log_probs"])
            }
            if layout == "one":
                case["logits"] = logits_error(policy, micros, batch, expected["logits"])
                case["faults"] = [
                    log_prob_error(build(out / name, layout, fault)[0], micros, batch, expected["log_probs"])
                    for fault in FAULTS.get(name, ())
                ]
            save_hf(out / f"{name}_{layout}", out / name, policy.shape, atlases, policy.parameters)
    (out / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

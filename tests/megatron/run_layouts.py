"""Run under torchrun with 2 ranks: every layout against transformers. Writes a JSON report for test_layouts.py.

    torchrun --nproc-per-node 2 tests/megatron/run_layouts.py OUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from cases import FAMILY_LAYOUTS

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.packing import Sample, plan_mini_batches
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.transfer import load_hf, save_hf
from megarl.workers.worker import join_world

TEMPERATURE = 0.8
# Name -> (mesh, parallel flags).
LAYOUTS = {
    "one": (MeshSpec((0,)), ParallelConfig()),
    "tp2": (MeshSpec((0, 1), tp=2), ParallelConfig(tensor_model_parallel_size=2)),
    "tp2_sp": (MeshSpec((0, 1), tp=2), ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": (MeshSpec((0, 1), pp=2), ParallelConfig(pipeline_model_parallel_size=2)),
    "dp2": (MeshSpec((0, 1)), ParallelConfig()),
    "one_stacked": (MeshSpec((0,)), ParallelConfig(qkv_layout="stacked")),
    "tp2_sp_stacked": (MeshSpec((0, 1), tp=2), ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, qkv_layout="stacked")),
    "ep2": (MeshSpec((0, 1), ep=2), ParallelConfig(expert_model_parallel_size=2)),
    "tp2_sp_ep2": (MeshSpec((0, 1), tp=2, ep=2, etp=1), ParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2, expert_tensor_parallel_size=1)),
}  # fmt: skip


def families() -> dict[str, object]:
    """Tiny random models of every family: biases and tied embeddings, q/k norms, neither, experts whose weights sum to 1 or not;
    vocabularies that need padding."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    common = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                  max_position_embeddings=128, rope_theta=10000.0)
    experts = common | dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, tie_word_embeddings=False)
    return {
        "qwen2_tied": Qwen2Config(vocab_size=130, tie_word_embeddings=True, **common),
        "qwen3": Qwen3Config(vocab_size=150, head_dim=32, tie_word_embeddings=False, **common),
        "llama": LlamaConfig(vocab_size=128, tie_word_embeddings=False, **common),
        "mistral": MistralConfig(vocab_size=140, head_dim=24, sliding_window=None, tie_word_embeddings=False, **common),
        "qwen3_moe": Qwen3MoeConfig(vocab_size=150, norm_topk_prob=True, **experts),
        "qwen3_moe_unscaled": Qwen3MoeConfig(vocab_size=150, norm_topk_prob=False, **experts),
    }


def make_folder(folder: Path, config) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # away from 1 and 0, so that a norm or bias that is not loaded shows
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name or "bias" in name else 0.1)
    model.save_pretrained(folder)


def make_batch(vocab_size: int, count: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(3)

    def ids(low: int, high: int) -> list[int]:
        n = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, vocab_size, (n,), generator=generator).tolist()

    batch = Batch.from_samples(list(range(count)), [ids(1, 9) for _ in range(count)], [ids(1, 17) for _ in range(count)])
    batch.advantages = torch.randn(len(batch.tokens), generator=generator) * batch.response_mask
    return batch


def hf_log_probs(folder: Path, batch: Batch) -> torch.Tensor:
    """[N] log-probs of the response tokens by transformers, one unpadded sequence at a time."""
    from transformers import AutoModelForCausalLM

    model, out = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"), []
    for row in range(len(batch)):
        sample = batch.select([row])
        with torch.no_grad():
            logits = model(sample.tokens[None]).logits[0] / TEMPERATURE
        out.append(F.log_softmax(logits, -1)[:-1].gather(1, sample.tokens[1:, None])[:, 0][sample.response_mask[1:]])
    return torch.cat(out)


def build(folder: Path, layout: str) -> tuple[Policy, dict]:
    mesh, parallel = LAYOUTS[layout]
    shape = ModelShape.load(str(folder))
    policy = Policy(shape, mesh, ModelConfig(model=str(folder)), parallel)
    atlases = megatron_atlases(shape, mesh, qkv_layout=parallel.qkv_layout)
    load_hf(str(folder), atlases[dist.get_rank()], policy.parameters)
    return policy, atlases


def micro_batches(policy: Policy, batch: Batch, max_tokens: int, seed: str) -> list[MicroBatch]:
    samples = [Sample(i, int(n), int(r)) for i, (n, r) in enumerate(zip(batch.lengths, batch.response_lengths))]
    (mini,) = plan_mini_batches(samples, len(samples), {}, policy.mesh.dp, max_tokens, 64, seed)
    return [MicroBatch.of(batch.select_samples(ids)) for ids in mini.micro_batches[policy.groups.dp.rank()]]


def check_layout(folder: Path, layout: str, batch: Batch, expected: torch.Tensor) -> dict:
    """Log-prob error; {} before the last stage."""
    policy, atlases = build(folder, layout)
    out, micros = {}, micro_batches(policy, batch, 60, "a")
    log_probs = policy.log_probs(micros, TEMPERATURE)
    if log_probs is not None:
        column = batch.scatter(expected)
        wanted = torch.cat([column[a:b][batch.response_mask[a:b]] for m in micros for a, b in spans(batch, m)])
        out["log_prob_error"] = (torch.cat(log_probs) - wanted).abs().max().item()
    save_hf(str(folder) + f"_{layout}_roundtrip", str(folder), policy.shape, atlases, policy.parameters)
    return out


def spans(batch: Batch, micro: MicroBatch) -> list[tuple[int, int]]:
    cu = batch.cu_seqlens.tolist()
    return [(cu[i], cu[i + 1]) for i in micro.batch.sample_ids.tolist()]


def main(out: Path) -> None:
    join_world(60)
    rank, report = dist.get_rank(), {}
    for mesh, _ in LAYOUTS.values():
        create_groups(mesh)
    for family, config in families().items():
        folder = out / family
        if rank == 0:
            make_folder(folder, config)
        dist.barrier()
        batch = make_batch(config.vocab_size)
        expected = hf_log_probs(folder, batch)
        for layout in FAMILY_LAYOUTS[family]:
            if rank in LAYOUTS[layout][0].ranks:
                report[f"{family}/{layout}"] = check_layout(folder, layout, batch, expected)
        dist.barrier()
    (out / f"report_{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Run under torchrun with 2 ranks: adapters in layouts. Writes JSON, gradients and weights for
test_lora.py.

torchrun --nproc-per-node 2 tests/megatron/run_lora.py OUT_FOLDER qwen2_tied/one qwen2_tied/tp2
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from cases import LORA
from expert_cases import make_batch

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.kernels.linear_head import LinearHead
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.megatron.value_model import ValueModel
from megarl.packing import Sample, plan_mini_batches
from megarl.reshard.atlas import Atlas, Sizes
from megarl.reshard.lora_atlas import adapter_sizes, with_adapters
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.peft import save_peft
from megarl.reshard.hf_weights import load_hf, save_hf
from megarl.workers.worker import join_world

TEMPERATURE = 0.8
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=("core_attn", "layernorm", "mlp"))
# Name -> (mesh, parallel flags). Names ending in _sharded have the distributed optimizer.
LAYOUTS = {
    "one": (MeshSpec((0,)), ParallelConfig()),
    "one_bf16": (MeshSpec((0,)), ParallelConfig()),
    "one_recompute": (MeshSpec((0,)), ParallelConfig(**RECOMPUTE)),
    "tp2": (MeshSpec((0, 1), tp=2), ParallelConfig(tensor_model_parallel_size=2)),
    "tp2_sp_selective": (
        MeshSpec((0, 1), tp=2),
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, **SELECTIVE),
    ),
    "tp2_sp_stacked_sharded": (
        MeshSpec((0, 1), tp=2),
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, qkv_layout="stacked"),
    ),
    "pp2": (MeshSpec((0, 1), pp=2), ParallelConfig(pipeline_model_parallel_size=2, **RECOMPUTE)),
    "pp2_vpp2": (
        MeshSpec((0, 1), pp=2, vpp=2),
        ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    ),
    "dp2": (MeshSpec((0, 1)), ParallelConfig()),
    "dp2_sharded": (MeshSpec((0, 1)), ParallelConfig()),
    "cp2": (MeshSpec((0, 1), cp=2), ParallelConfig(context_parallel_size=2)),
    "tp2_sp": (MeshSpec((0, 1), tp=2), ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2_sp_ep2": (
        MeshSpec((0, 1), tp=2, ep=2, etp=1),
        ParallelConfig(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=1,
        ),
    ),
}


def families() -> dict[str, object]:
    """Tiny random models: biases and tied embeddings; norms of a layer's output, scaled embeddings; a critic;
    experts, which have no adapters."""
    from transformers import Gemma3TextConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    common = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=10000.0,
    )
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)
    return {
        "qwen2_tied": Qwen2Config(vocab_size=130, tie_word_embeddings=True, **common),
        "gemma3": Gemma3TextConfig(
            vocab_size=150,
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=24,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            **(common | dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])),
        ),
        "critic": Qwen3Config(vocab_size=130, head_dim=16, tie_word_embeddings=False, **common),
        "qwen3_moe": Qwen3MoeConfig(
            vocab_size=150, head_dim=16, tie_word_embeddings=False, **common, **experts
        ),
    }


def make_folder(folder: Path, config) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # away from 1 and 0, so that a norm or bias that is not loaded shows
        for name, p in model.named_parameters():
            p.normal_(
                1.0 if "norm" in name and config.model_type != "gemma3_text" else 0.0,
                0.2 if "norm" in name or "bias" in name else 0.1,
            )
    model.save_pretrained(folder)


class Case:
    """One layout of one model, its adapters away from zero."""

    def __init__(self, out: Path, family: str, layout: str, batch: Batch) -> None:
        self.folder, self.family, self.layout, self.batch, self.lora = (
            out / family,
            family,
            layout,
            batch,
            LORA[family],
        )
        self.out = out / f"{family}_{layout}"
        mesh, parallel = LAYOUTS[layout]
        self.shape = ModelShape.load(str(self.folder), value_head=family == "critic")
        # clip_grad above any norm: the norm is measured, and the gradients stay what they were. eps: see
        # run_equivalence.py
        optimizer = OptimizerConfig(
            lr=1e-2, clip_grad=1e9, adam_eps=1e-5, use_distributed_optimizer=layout.endswith("_sharded")
        )
        kind = ValueModel if family == "critic" else Policy
        self.model = kind(
            self.shape,
            mesh,
            ModelConfig(model=str(self.folder), bf16=layout.endswith("_bf16")),
            parallel,
            optimizer,
            lora=self.lora,
        )
        base = megatron_atlases(self.shape, mesh, qkv_layout=parallel.qkv_layout)
        self.atlases = {rank: with_adapters(atlas, self.lora) for rank, atlas in base.items()}
        load_hf(str(self.folder), base[dist.get_rank()], self.model.parameters, self.shape)
        draw(self.atlases[dist.get_rank()], adapter_sizes(self.shape, self.lora), self.model.parameters)
        if (head := self.model.parameters.get("value_head.weight")) is not None:
            head.fill_(0.1)  # from 0, with which a critic starts, no gradient reaches the adapters
        self.model.parameters_changed()

    def micro_batches(self) -> list[MicroBatch]:
        batch, policy = self.batch, self.model
        samples = [
            Sample(i, int(n), int(r)) for i, (n, r) in enumerate(zip(batch.lengths, batch.response_lengths))
        ]
        (mini,) = plan_mini_batches(samples, len(samples), {}, policy.mesh.dp, 60, 64, "a")
        return [
            MicroBatch.of(batch.select_samples(ids)) for ids in mini.micro_batches[policy.groups.dp.rank()]
        ]

    def update(self, micros: list[MicroBatch]) -> dict[str, float]:
        num_tokens = int(self.batch.response_mask.sum())
        self.model.advance_schedule()
        if self.family == "critic":

            def value_loss(micro, values):
                value = ((values - micro.column("advantages").to(values.device)) ** 2).sum() / num_tokens
                return value, {"loss": value.detach()}

            return self.model.update(micros, value_loss)

        def loss(micro, log_probs, entropy, rows):
            value = (
                -(log_probs * micro.column("advantages")[rows].to(log_probs.device)).sum() / num_tokens
                - 0.01 * entropy.sum() / num_tokens
            )
            return value, {"loss": value.detach()}

        return self.model.update(micros, loss, TEMPERATURE, with_entropy=True)

    def outputs(self, micros: list[MicroBatch]) -> dict[str, list[float]] | None:
        """Sample id -> log-probs or values of its response."""
        out = (
            self.model.values(micros)
            if self.family == "critic"
            else self.model.log_probs(micros, TEMPERATURE)
        )
        if out is None:
            return None
        lengths = [
            (int(i), int(n))
            for micro in micros
            for i, n in zip(micro.batch.sample_ids, micro.batch.response_lengths)
        ]
        return {
            i: part.tolist() for (i, _), part in zip(lengths, torch.cat(out).split([n for _, n in lengths]))
        }

    def save_adapters(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_peft(f"{self.out}_{name}", str(self.folder), self.shape, self.atlases, tensors, self.lora)

    def run(self) -> dict:
        model, micros = self.model, self.micro_batches()
        before = {name: p.clone() for name, p in model.parameters.items()}
        self.save_adapters("start", model.parameters)
        model.merge_adapters()
        save_hf(f"{self.out}_merged_start", str(self.folder), self.shape, self.atlases, model.weights)
        report = {"outputs": self.outputs(micros)}
        with model.adapters.off():
            report["outputs_off"] = self.outputs(micros)
        asked, backward = [], LinearHead.backward
        LinearHead.backward = lambda head, *args, **kw: (
            asked.append(args[4] is not None),
            backward(head, *args, **kw),
        )[1]
        report["updates"] = [self.update(micros)]
        LinearHead.backward = backward
        report["output_weight_gradients"] = sum(asked)
        if not self.layout.endswith("_sharded"):
            grads = {
                name: p.main_grad.view(p.shape[0], -1)
                for name, p in model.named_parameters()
                if p.requires_grad
            }
            self.save_adapters("grads", grads)
        report["updates"].append(self.update(micros))
        self.save_adapters("updated", model.parameters)
        model.merge_adapters()
        save_hf(f"{self.out}_merged", str(self.folder), self.shape, self.atlases, model.weights)
        is_base = lambda name: ".adapter." not in name and name != "value_head.weight"
        report["changed"] = [
            name for name, p in model.parameters.items() if is_base(name) and not torch.equal(p, before[name])
        ]
        report["unchanged"] = [
            name for name, p in model.parameters.items() if not is_base(name) and torch.equal(p, before[name])
        ]
        report["adapter_elements"] = sum(
            p.numel() for name, p in model.parameters.items() if not is_base(name)
        )
        report["bytes"] = {
            part: model.memory.resident_bytes(part) for part in ("parameters", "gradients", "optimizer")
        }
        return report


def draw(atlas: Atlas, sizes: Sizes, parameters: dict[str, torch.Tensor]) -> None:
    """Adapters that are not 0 anywhere (training starts with B = 0, and then A has no gradient), the same in
    every layout."""
    for name in (name for name in atlas if ".adapter." in name):
        for p in atlas[name].pieces:
            full = (
                torch.randn(
                    sizes[p.hf_name], generator=torch.Generator().manual_seed(zlib.crc32(p.hf_name.encode()))
                )
                * 0.1
            )
            rows, cols = (
                slice(p.local_row, p.local_row + p.row_end - p.row_start),
                slice(p.local_col, p.local_col + p.col_end - p.col_start),
            )
            parameters[name][rows, cols] = full[p.row_start : p.row_end, p.col_start : p.col_end]


# ------------------------------------------------------------------ an independent reference


class LoRALinear(torch.nn.Module):
    """y = W x + scale B (A x), the arithmetic of PEFT's Linear."""

    def __init__(
        self, base: torch.nn.Linear, down: torch.nn.Parameter, up: torch.nn.Parameter, scale: float
    ) -> None:
        super().__init__()
        self.base, self.down, self.up, self.scale = base, down, up, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up) * self.scale


FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "fc1", "up_proj": "fc1"}


def write_reference(out: Path, family: str, batch: Batch) -> None:
    """Log-probs and gradients of the loss above by transformers in fp64, for the adapters that layout `one`
    started with."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        out / family, dtype=torch.float64, attn_implementation="eager"
    ).requires_grad_(False)
    adapters, lora = load_file(out / f"{family}_one_start" / "adapter_model.safetensors"), LORA[family]
    trained: dict[str, torch.nn.Parameter] = {}
    shared: dict[str, torch.nn.Parameter] = {}
    for name in [name for name in adapters if name.endswith("lora_A.weight")]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        parent, _, leaf = path.rpartition(".")
        down = shared.setdefault(
            f"{parent}.{FUSED.get(leaf, leaf)}", torch.nn.Parameter(adapters[name].double())
        )
        assert torch.equal(down, adapters[name].double())
        up = torch.nn.Parameter(adapters[name.replace("lora_A", "lora_B")].double())
        module = model.get_submodule(parent)
        setattr(module, leaf, LoRALinear(getattr(module, leaf), down, up, lora.lora_alpha / lora.lora_rank))
        trained |= {name: down, name.replace("lora_A", "lora_B"): up}
    total, num_tokens, outputs = 0.0, int(batch.response_mask.sum()), {}
    for row in range(len(batch)):
        sample = batch.select([row])
        mask = sample.response_mask[1:]
        log_softmax = F.log_softmax(model(sample.tokens[None]).logits[0] / TEMPERATURE, -1)[:-1][mask]
        log_probs = log_softmax.gather(1, sample.tokens[1:][mask][:, None])[:, 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        total = (
            total
            - (log_probs * sample.advantages[1:][mask]).sum() / num_tokens
            - 0.01 * entropy.sum() / num_tokens
        )
        outputs[int(sample.sample_ids[0])] = log_probs.tolist()
    total.backward()
    save_file(
        {name: p.grad.clone() for name, p in trained.items()}, out / f"{family}_reference_grads.safetensors"
    )
    (out / f"{family}_reference.json").write_text(json.dumps({"loss": total.item(), "outputs": outputs}))


def hf_log_probs(folder: Path, batch: Batch) -> dict[int, list[float]]:
    from transformers import AutoModelForCausalLM

    model, outputs = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"),
        {},
    )
    for row in range(len(batch)):
        sample = batch.select([row])
        with torch.no_grad():
            log_softmax = F.log_softmax(model(sample.tokens[None]).logits[0] / TEMPERATURE, -1)[:-1]
        outputs[int(sample.sample_ids[0])] = log_softmax.gather(1, sample.tokens[1:, None])[:, 0][
            sample.response_mask[1:]
        ].tolist()
    return outputs


def main(out: Path, *cases: str) -> None:
    join_world(60)
    rank, report = dist.get_rank(), {}
    for mesh, _ in LAYOUTS.values():
        create_groups(mesh)
    for family, config in families().items():
        if rank == 0:
            make_folder(out / family, config)
        dist.barrier()
        batch = make_batch(config.vocab_size)
        batch.advantages = (
            batch.spread(torch.ones(len(batch))) + batch.advantages.abs()
        )  # of one sign: no difference of large numbers
        for layout in (
            layout for name, _, layout in (case.partition("/") for case in cases) if name == family
        ):
            if rank in LAYOUTS[layout][0].ranks:
                report[f"{family}/{layout}"] = Case(out, family, layout, batch).run()
        if rank == 0 and family in ("qwen2_tied", "gemma3"):
            write_reference(out, family, batch)
            for name in ("", "_one_merged_start"):
                report[f"{family}{name}"] = hf_log_probs(out / f"{family}{name}", batch)
        dist.barrier()
    (out / f"report_{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

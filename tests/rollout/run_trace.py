"""One process: vLLM's tables against traces of its loaders, and traces of unknown models against vLLM's own
loading.

python tests/rollout/run_trace.py FOLDER [--every-rank]     tables of the last rank of each size, or of all ranks"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
sys.path.insert(0, str(Path(__file__).parent))
import jobs
import torch
import transformers
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import Atlas, LocalParam, Piece, hf_sizes
from megarl.reshard.plan import make_plan
from megarl.reshard.vllm_atlas import vllm_atlas
from megarl.rollout.trace import empty_model, trace_vllm_atlas
from megarl.rollout.weight_transfer import engine_atlas

_SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=130,
    max_position_embeddings=128,
    pad_token_id=0,
)
# no table knows these: fused tensors in the checkpoint, norms of other names, experts beside shared ones
UNKNOWN = {
    "phi3": transformers.Phi3Config(tie_word_embeddings=False, **_SIZES),
    "gemma2": transformers.Gemma2Config(head_dim=32, **_SIZES),
    "olmo2": transformers.Olmo2Config(tie_word_embeddings=False, **_SIZES),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        **_SIZES,
    ),
}


def vllm_config(folder: Path):
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64
    )
    return arguments.create_engine_config()


def join_groups(config) -> None:
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            1, 0, f"file:///tmp/megarl-trace-{os.getpid()}", 0, "gloo"
        )
        parallel_state.initialize_model_parallel(1)


@contextlib.contextmanager
def rank_of_engine(config, tp_size: int, tp_rank: int):
    """Layers are built and loaded as on that rank of a larger engine; none is run."""
    real, config.parallel_config.tensor_parallel_size = parallel_state._TP, tp_size
    parallel_state._TP = SimpleNamespace(
        world_size=tp_size,
        rank_in_group=tp_rank,
        rank=tp_rank,
        device_group=real.device_group,
        cpu_group=real.cpu_group,
        unique_name="tp",
    )
    try:
        yield
    finally:
        parallel_state._TP, config.parallel_config.tensor_parallel_size = real, 1


def comparable(atlas: Atlas) -> dict:
    return {name: (p.rows, p.cols, p.padding_rows, sorted(map(repr, p.pieces))) for name, p in atlas.items()}


def tables(folder: Path, every_rank: bool) -> list[str]:
    """What differs between table and trace, over all families, with 4 ranks on 2 key heads as well."""
    different = []
    for name in jobs.CONFIGS:
        model = jobs.make_folder(folder / name, name)
        config, shape = vllm_config(model), ModelShape.load(model)
        for tp_size in (1, 2, 4):
            for rank in range(0 if every_rank else tp_size - 1, tp_size):
                with rank_of_engine(config, tp_size, rank):
                    traced = comparable(trace_vllm_atlas(empty_model(config), hf_sizes(shape)))
                table = comparable(vllm_atlas(shape, tp_size, rank))
                different += [
                    f"{name} {rank}/{tp_size} {key}: {traced.get(key)} and {table.get(key)}"
                    for key in traced.keys() | table.keys()
                    if traced.get(key) != table.get(key)
                ]
    return different


def save(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(UNKNOWN[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder / name)


def unknown(folder: Path, name: str, tp_size: int) -> dict:
    """A checkpoint through a plan into the traced atlas, and through vLLM's own loader into a real model."""
    config, full = vllm_config(folder / name), load_file(folder / name / "model.safetensors")
    matrices = {key: t if t.dim() == 2 else t[:, None] for key, t in full.items()}
    sizes = {key: tuple(t.shape) for key, t in matrices.items()}
    source = {
        key: LocalParam(rows, cols, (Piece(key, 0, rows, 0, cols, 0, 0),))
        for key, (rows, cols) in sizes.items()
    }
    different, elements = [], 0
    for rank in range(tp_size):
        with rank_of_engine(config, tp_size, rank):
            atlas = engine_atlas(config)
            config.compilation_config.static_forward_context.clear()
            with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
                loaded = initialize_model(config)
                loaded.load_weights(iter(full.items()))
        got = {key: torch.zeros(p.rows, p.cols) for key, p in atlas.items()}
        for copies in make_plan({0: source}, {0: atlas}).copies.values():
            for c in copies:
                part = matrices[c.src_name][c.src_row : c.src_row + c.rows, c.src_col : c.src_col + c.cols]
                got[c.dst_name][c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols] = part
        for key, parameter in loaded.named_parameters():
            elements += parameter.numel()
            if not torch.equal(got[key].view(parameter.shape), parameter.data):
                different.append(f"{key} of rank {rank}")
    return {"different": different, "elements": elements}


def refusals(folder: Path) -> list[str]:
    """A loader that computes, one that transposes, one that takes every second column."""

    class Loads(torch.nn.Module):
        def __init__(self, load) -> None:
            super().__init__()
            self.w, self.load = torch.nn.Parameter(torch.empty(4, 4)), load

        def load_weights(self, weights) -> None:
            for _, tensor in weights:
                self.load(self.w.data, tensor)

    said = []
    for load in (
        lambda w, t: w.copy_(2 * t),
        lambda w, t: w.copy_(t.t()),
        lambda w, t: w[:, ::2].copy_(t[:, ::2]),
        lambda w, t: w.add_(t),
    ):
        try:
            trace_vllm_atlas(Loads(load), {"t": (4, 4)})
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def main() -> None:
    folder = Path(sys.argv[1])
    for name in UNKNOWN:  # before vLLM decorates classes of transformers
        save(folder, name)
    join_groups(
        vllm_config(jobs.make_folder(folder / "experts_first", "qwen3_moe"))
    )  # vLLM makes its expert group for such models only
    report = {"tables": tables(folder, "--every-rank" in sys.argv), "refusals": refusals(folder)}
    report |= {f"{name} {tp_size}": unknown(folder, name, tp_size) for name in UNKNOWN for tp_size in (1, 2)}
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()

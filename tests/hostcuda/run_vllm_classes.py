"""Trace vLLM's models as its CUDA platform configures them, and compare the traces with our tables.

The process has the emulated device, and vLLM's Python code is that of a CUDA wheel. Its compiled extensions
are not there: whoever calls a kernel gets an error. Writes report.json for test_vllm_classes.py.

    run_vllm_classes.py FOLDER cuda|cpu"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from unittest.mock import patch

import torch

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
EXTENSIONS = ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C")
TP_SIZES = (1, 2)
LATENT_HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""DeepSeek's own sizes. On CUDA vLLM has no attention for the tiny ones that tests use on a CPU."""


class Kernels:
    """Stands for torch.ops._C, which a CUDA wheel fills: no kernel is there, and none supports anything."""

    def __getattr__(self, name: str):
        if "support" in name:
            return lambda *arguments: False
        if name.endswith("_and_mul"):  # layers keep them for their forward pass
            return _refuse
        raise AttributeError(name)


def _refuse(*arguments: object) -> None:
    raise NotImplementedError("a kernel of vLLM, which was not built")


def choose_cuda() -> None:
    """Make vLLM's platform that of a CUDA wheel. Call this before the rest of vLLM is imported."""
    for name in EXTENSIONS:
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    torch.ops._C = Kernels()
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms._current_platform = NonNvmlCudaPlatform()


def engine_config(folder: Path):
    """Return vLLM's configuration in bf16: on CUDA no backend computes latent attention in fp32."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64
    )
    return arguments.create_engine_config()


def traces(folder: Path) -> dict[str, dict]:
    """Return the atlases of families without a table, as an engine reads them off vLLM's loader."""
    import jobs
    import run_trace

    from megarl.config.hf_config import FAMILIES, ModelShape
    from megarl.reshard.atlas import hf_sizes
    from megarl.rollout.trace import empty_model, trace_vllm_atlas

    families = {
        name: type(config).from_dict(config.to_dict() | LATENT_HEADS)
        for name, config in jobs.UNTABLED.items()
    }
    found = {}
    for name, config in (families | {"qwen2_moe": run_trace.UNKNOWN["qwen2_moe"]}).items():
        config.architectures = [FAMILIES[config.model_type].architecture]
        config.save_pretrained(folder / name)
        engine, sizes = engine_config(folder / name), hf_sizes(ModelShape.load(folder / name))
        for size in TP_SIZES:
            for rank in range(size):
                with run_trace.rank_of_engine(engine, size, rank):
                    atlas = trace_vllm_atlas(empty_model(engine), sizes)
                found[f"{name} {rank}/{size}"] = run_trace.comparable(atlas)
    return found


def planted(folder: Path) -> list[str]:
    """Return what is reported of a table that has the rows of qkv_proj in Megatron's order."""
    import jobs
    import run_trace

    from megarl.reshard.atlas import Row
    from megarl.reshard.megatron_atlas import grouped_qkv
    from megarl.reshard.vllm_atlas import LAYER, TABLES, fused_qkv

    wrong = tuple(
        Row(row.name, grouped_qkv, *row.hf_names) if row.layout is fused_qkv else row for row in LAYER
    )
    only = {"qwen3": jobs.CONFIGS["qwen3"]}
    with patch.dict(TABLES, qwen3=wrong), patch.dict(jobs.CONFIGS, only, clear=True):
        return run_trace.tables(folder, every_rank=True)


def main(folder: Path, platform: str) -> None:
    if platform == "cuda":
        choose_cuda()
    import jobs
    import run_trace
    from vllm.platforms import current_platform

    # vLLM makes its expert group for models with experts only
    run_trace.join_groups(run_trace.vllm_config(jobs.make_folder(folder / "experts_first", "qwen3_moe")))
    report = {"platform": current_platform.device_type, "traces": traces(folder)}
    if platform == "cuda":
        report |= {"tables": run_trace.tables(folder, every_rank=True), "planted": planted(folder)}
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

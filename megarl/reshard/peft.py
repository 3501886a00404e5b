"""Write adapters as a folder that PEFT, and vLLM with it, loads: adapter_config.json and
adapter_model.safetensors."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.hf_config import ModelShape
from megarl.config.schema import LoRAConfig
from megarl.reshard.atlas import VALUE_HEAD, Atlas, hf_sizes, whole
from megarl.reshard.export_folder import new_folder, save_tensors, write_json
from megarl.reshard.lora_atlas import peft_atlas
from megarl.reshard.plan import make_plan
from megarl.reshard.transfer import Transfer


@torch.no_grad()
def save_peft(
    folder: str | os.PathLike,
    base_model: str,
    shape: ModelShape,
    atlases: dict[int, Atlas],
    tensors: dict[str, Tensor],
    lora: LoRAConfig,
) -> None:
    """Write the LoRA adapters that the ranks of `atlases` hold, and the value head if there is one.
    Collective over those ranks; the lowest writes. The folder appears at once and complete.

    Args:
        base_model: folder of the model that they adapt.
        atlases: with adapters. tensors: this rank's [rows, cols] parameters by the names of its atlas.
    Raises: FileExistsError if `folder` holds something that is not an adapter."""
    root, rank = min(atlases), dist.get_rank() if dist.is_initialized() else 0
    wanted = peft_atlas(shape, lora)
    if shape.value_head:
        wanted[f"base_model.model.{VALUE_HEAD}"] = whole(VALUE_HEAD, *hf_sizes(shape)[VALUE_HEAD])
    plan, example = make_plan(atlases, {root: wanted}), next(iter(tensors.values()))
    full = {
        name: torch.empty(param.rows, param.cols, dtype=example.dtype, device=example.device)
        for name, param in wanted.items()
    }
    if rank in plan.ranks:
        Transfer(plan, rank, tensors, full, dict.fromkeys(wanted, example.dtype)).run()
    if rank != root:
        return
    with new_folder(Path(folder), "adapter_config.json", "an exported adapter") as partial:
        save_tensors(
            {name: tensor.cpu() for name, tensor in full.items()}, partial / "adapter_model.safetensors"
        )
        write_json(partial / "adapter_config.json", _config(base_model, shape, wanted, lora))


def _config(base_model: str, shape: ModelShape, wanted: Atlas, lora: LoRAConfig) -> dict[str, object]:
    """Return the fields of PEFT's LoraConfig that the adapters need; all others have defaults."""
    modules = {name.split(".")[-3] for name in wanted if name.endswith(".lora_A.weight")}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if shape.value_head else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "target_modules": sorted(modules),
        "modules_to_save": ["score"] if shape.value_head else None,
        "inference_mode": True,
    }

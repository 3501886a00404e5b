"""Writes adapters as a folder that PEFT, and vLLM with it, loads: adapter_config.json and
adapter_model.safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.hf_config import ModelShape
from megarl.config.schema import LoRAConfig
from megarl.files.writing import writing
from megarl.reshard.atlas import VALUE_HEAD, Atlas, LocalParam, Piece, hf_sizes
from megarl.reshard.lora_atlas import peft_atlas
from megarl.reshard.plan import make_plan
from megarl.reshard.transfer import Transfer, publish, removed_if_failed, save_tensors, write_text


@torch.no_grad()
def save_peft(
    folder: str | os.PathLike,
    base_model: str,
    shape: ModelShape,
    atlases: dict[int, Atlas],
    tensors: dict[str, Tensor],
    lora: LoRAConfig,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the adapters that the ranks of `atlases` hold, and the value head if there is one. Collective
    over those ranks; the lowest writes. The folder appears at once and complete.

    Args:
        base_model: folder of the model that they adapt.
        atlases: with adapters. tensors: this rank's [rows, cols] parameters by the names of its atlas.
    Raises: FileExistsError if `folder` holds something that is not an adapter."""
    folder, root, rank = Path(folder), min(atlases), dist.get_rank() if dist.is_initialized() else 0
    wanted = peft_atlas(shape, lora)
    if shape.value_head:
        rows, cols = hf_sizes(shape)[VALUE_HEAD]
        wanted[f"base_model.model.{VALUE_HEAD}"] = LocalParam(
            rows, cols, (Piece(VALUE_HEAD, 0, rows, 0, cols, 0, 0),)
        )
    plan, example = make_plan(atlases, {root: wanted}), next(iter(tensors.values()))
    full = {
        name: torch.empty(param.rows, param.cols, dtype=example.dtype, device=example.device)
        for name, param in wanted.items()
    }
    if rank in plan.ranks:
        Transfer(plan, rank, tensors, full, group, dtype=example.dtype).run()
    if rank != root:
        return
    if folder.exists() and any(folder.iterdir()) and not (folder / "adapter_config.json").exists():
        raise FileExistsError(
            f"{folder} exists and is not an exported adapter: it has no adapter_config.json. Move it away."
        )
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    with writing(partial):
        partial.mkdir(parents=True)
    with removed_if_failed(partial):
        save_tensors(
            {name: tensor.cpu() for name, tensor in full.items()}, partial / "adapter_model.safetensors"
        )
        write_text(
            partial / "adapter_config.json",
            json.dumps(_config(base_model, shape, wanted, lora), indent=2) + "\n",
        )
    publish(partial, folder)


def _config(base_model: str, shape: ModelShape, wanted: Atlas, lora: LoRAConfig) -> dict[str, object]:
    """Return what PEFT's LoraConfig needs; it has defaults for the rest."""
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

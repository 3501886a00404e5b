"""What of a model's configuration changes the function that its weights compute: stored in checkpoints,
compared before weights are loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from megarl.config.hf_config import ModelShape
from megarl.config.schema import LoRAConfig

_CHANGE_NOTHING = (
    "eos_token_ids",
    "torch_dtype",
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "value_head",
)
"""Fields of ModelShape that no forward pass reads, or that another name of the role says already. Every other
field counts, also one that is added later."""


def function_fields(shape: ModelShape, lora: LoRAConfig | None = None) -> dict[str, object]:
    """Name -> value, as JSON gives it back. Adapters count with their rank and scale."""
    fields = {
        field.name: getattr(shape, field.name)
        for field in dataclasses.fields(shape)
        if field.name not in _CHANGE_NOTHING
    }
    if lora is not None and lora.lora_rank:
        fields |= {"lora_rank": lora.lora_rank, "lora_alpha": lora.lora_alpha}
    return json.loads(json.dumps(fields))


def differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """'rope_theta 10000.0, not 1000000.0' for every field that was saved and is another now."""
    return [
        f"{name} {saved[name]}, not {now.get(name, 'none')}"
        for name in {**now, **saved}
        if name in saved and saved[name] != now.get(name)
    ]


def not_compared(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Fields that a checkpoint of an earlier version does not have. Values that mean nothing there (0, null,
    false) are left out."""
    return [name for name, value in now.items() if name not in saved and value]

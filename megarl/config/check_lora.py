"""Rules about adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.flags import OF_ROLES
from megarl.config.hf_config import ModelShape
from megarl.config.schema import LORA_TARGETS, LoRAConfig, TrainConfig


def lora_findings(config: TrainConfig, shapes: Mapping[str, ModelShape | None]) -> Iterator[str]:
    """Every rule that is broken, perhaps twice.

    Args:
        shapes: of each role's model, None if its config.json could not be used."""
    optimizers = {"actor": config.optimizer, "critic": config.critic_optimizer}
    for role, section in OF_ROLES[LoRAConfig].items():
        lora: LoRAConfig | None = getattr(config, section)
        if lora is None:
            continue
        prefix = "" if config.critic_lora in (None, config.lora) else f"{role}-"
        if not lora.lora_rank:
            yield from _without_effect(lora, prefix)
            continue
        if shapes[role] is not None:
            yield from _targets(lora, shapes[role], f"--{prefix}lora-target-modules")
        if optimizers[role].optimizer_cpu_offload:
            yield (
                f"--optimizer-cpu-offload: nobody has proven it with --{prefix}lora-rank "
                f"({lora.lora_rank}), whose optimizer state is "
                "small. Leave it out."
            )


def _targets(lora: LoRAConfig, shape: ModelShape, flag: str) -> Iterator[str]:
    without = {"linear_qkv": "multi-head latent attention has no such layer"} if shape.is_mla else {}
    if shape.is_moe:
        without |= dict.fromkeys(
            ("linear_fc1", "linear_fc2"), "in a mixture of experts it is the experts', which have no adapters"
        )
    wrong = [target for target in lora.lora_target_modules if target in without]
    if wrong:
        reasons = "; ".join(dict.fromkeys(without[target] for target in wrong))
        fits = [target for target in lora.lora_target_modules if target not in without] or [
            t for t in LORA_TARGETS if t not in without
        ]
        yield f"{flag} ({' '.join(wrong)}): {reasons}. Try {flag} {' '.join(fits)}."


def _without_effect(lora: LoRAConfig, prefix: str) -> Iterator[str]:
    default = LoRAConfig()
    for field, value in {
        "lora-alpha": f"{lora.lora_alpha:g}",
        "lora-target-modules": " ".join(lora.lora_target_modules),
    }.items():
        name = field.replace("-", "_")
        if getattr(lora, name) != getattr(default, name):
            yield (
                f"--{prefix}{field} ({value}): has no effect without --{prefix}lora-rank. Leave "
                f"it out, or try --{prefix}lora-rank 16."
            )

"""Rules about Megatron-FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config.check_parallel import MegatronRole
from megarl.config.schema import LoRAConfig, OptimizerConfig, TrainConfig

_UNPROVEN = (
    "optim_grads_params: the weights are shards between two passes, and no weight sync, export or "
    "checkpoint reads these",
    "no_shard: shards nothing, as without --use-megatron-fsdp",
)


def sharding_findings(config: TrainConfig, roles: Sequence[MegatronRole]) -> Iterator[str]:
    """Every rule that is broken, perhaps twice."""
    sections = {
        "actor": (config.optimizer, config.lora),
        "critic": (config.critic_optimizer, config.critic_lora),
    }
    for role in roles:
        if role.name in sections:
            optimizer, lora = sections[role.name]
            prefix = "" if config.critic_optimizer in (None, config.optimizer) else f"{role.name}-"
            yield from (
                _of_role(role, optimizer, lora, prefix)
                if optimizer.use_megatron_fsdp
                else _without_effect(optimizer, prefix)
            )


def _without_effect(optimizer: OptimizerConfig, prefix: str) -> Iterator[str]:
    strategy = optimizer.data_parallel_sharding_strategy
    if strategy != OptimizerConfig().data_parallel_sharding_strategy:
        yield (
            f"--{prefix}data-parallel-sharding-strategy ({strategy}): has no effect without "
            f"--{prefix}use-megatron-fsdp. Leave it out, or "
            "set that."
        )


def _of_role(
    role: MegatronRole, optimizer: OptimizerConfig, lora: LoRAConfig | None, prefix: str
) -> Iterator[str]:
    flag, strategy = f"--{prefix}use-megatron-fsdp", optimizer.data_parallel_sharding_strategy
    for refused in _UNPROVEN:
        name, _, why = refused.partition(": ")
        if strategy == name:
            yield (
                f"--{prefix}data-parallel-sharding-strategy ({name}): {why}. Try "
                f"--{prefix}data-parallel-sharding-strategy optim_grads."
            )
    for field in ("overlap_grad_reduce", "optimizer_cpu_offload"):
        if getattr(optimizer, field):
            yield f"{flag}: does not go with --{prefix}{field.replace('_', '-')}. Leave one of the two out."
    if not optimizer.use_distributed_optimizer:
        yield (
            f"{flag}: Megatron has it with its distributed optimizer only. Leave "
            f"--no-{prefix}use-distributed-optimizer out."
        )
    if lora is not None and lora.lora_rank:
        yield (
            f"{flag}: nobody has proven it with --{prefix}lora-rank ({lora.lora_rank}), whose "
            "optimizer state is small. Leave it out."
        )
    for field in ("pipeline_model_parallel_size", "tensor_model_parallel_size"):
        if (size := getattr(role.parallel, field)) > 1:
            yield (
                f"{flag}: nobody has proven it with {role.flag(field)} ({size}). Leave it out, or "
                f"try {role.flag(field)} 1."
            )
    if role.shape is not None and role.shape.is_moe:
        yield (
            f"{flag}: nobody has proven it with a mixture of experts, which "
            f"{role.shape.model_type} is. Leave it out."
        )
    if role.parallel.offload:
        yield (
            f"{flag}: its buffers stay where they are, and {role.flag('offload')} "
            f"({' '.join(role.parallel.offload)}) would move them. "
            "Leave one of the two out."
        )

"""Rules about what leaves the device between the phases of a role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config.check_parallel import MegatronRole
from megarl.config.reward_models import reward_models
from megarl.config.schema import TrainConfig


def offload_findings(config: TrainConfig, roles: Sequence[MegatronRole], engine: str | None) -> Iterator[str]:
    """Every rule that is broken, perhaps twice.

    Args:
        engine: 'in-process', 'out-of-process', or None: there is none."""
    trained = [role for role in roles if role.name in ("actor", "critic")]
    for role in roles:
        flag, parts = role.flag("offload"), role.parallel.offload
        if len({*parts}) < len(parts):
            yield (
                f"{flag} ({' '.join(parts)}): names a part twice. Try {flag} "
                f"{' '.join(dict.fromkeys(parts))}."
            )
        surplus = [part for part in parts if part != "parameters"]
        # what comes from the flag of all roles, or from the actor's, means the roles that train
        if role not in trained and surplus and all(parts != other.parallel.offload for other in trained):
            yield (
                f"{flag} ({' '.join(parts)}): the {role.name} is frozen, it has no "
                f"{' and no '.join(surplus)}. "
                f"Try {flag} parameters."
            )
    yield from _other_reward_models(config, roles)
    offloaded = [*(role.parallel.offload for role in roles), config.reward.offload if config.reward else ()]
    if config.placement.offload_ahead_bytes and not any(offloaded):
        yield (
            f"--offload-ahead-bytes ({config.placement.offload_ahead_bytes}): has no effect "
            "without --offload. Leave it out, or set that."
        )
    yield from _hybrid_optimizer(config, trained)
    if engine is not None and "parameters" in config.actor.offload:
        yield from _engine(
            config, next(role for role in roles if role.name == "actor").flag("offload"), engine
        )


def _other_reward_models(config: TrainConfig, roles: Sequence[MegatronRole]) -> Iterator[str]:
    """Of reward models that Megatron does not run, what was said of them and not of all roles."""
    parts = () if config.reward is None else config.reward.offload
    if not parts or any(role.name == "reward" for role in roles) or parts == config.actor.offload:
        return
    try:
        backends = {model.backend for model in reward_models(config)}
    except ValueError:  # what is wrong with them is reported
        return
    given = f"--reward-offload ({' '.join(parts)})"
    if backends == {"judge"}:
        yield f"{given}: a judge runs in processes of vLLM's own, whose memory stays. Leave it out."
    elif surplus := [part for part in parts if part != "parameters"]:
        yield (
            f"{given}: the reward is frozen, it has no {' and no '.join(surplus)}. Try "
            "--reward-offload parameters."
        )


def _hybrid_optimizer(config: TrainConfig, trained: Sequence[MegatronRole]) -> Iterator[str]:
    """As Megatron's precision-aware path demands, and what has no sense together."""
    optimizers = {"actor": config.optimizer, "critic": config.critic_optimizer}
    for role in trained:
        optimizer = optimizers[role.name]
        prefix = "" if config.critic_optimizer in (None, config.optimizer) else f"{role.name}-"
        flag = f"--{prefix}optimizer-cpu-offload"
        if optimizer.optimizer_cpu_offload and not optimizer.use_distributed_optimizer:
            yield (
                f"{flag}: Megatron has it with --{prefix}use-distributed-optimizer only. Leave "
                "one of the two flags out."
            )
        if optimizer.optimizer_cpu_offload and "optimizer" in role.parallel.offload:
            yield (
                f"{flag}: the optimizer state is in host memory for good, and "
                f"{role.flag('offload')} (optimizer) would move it for a "
                "while. Leave one of the two out."
            )
        if optimizer.optimizer_offload_fraction != 1 and not optimizer.optimizer_cpu_offload:
            yield (
                f"--{prefix}optimizer-offload-fraction ({optimizer.optimizer_offload_fraction:g}): "
                f"has no effect without {flag}. "
                "Leave it out, or set that."
            )


def _engine(config: TrainConfig, flag: str, engine: str) -> Iterator[str]:
    """Who else reads the actor's weights where they are."""
    if engine == "in-process" and config.reshard.reshard_alias:
        yield (
            f"{flag} (parameters): the engine generates with the actor's own memory where it can "
            "(--reshard-alias), which must stay. "
            "Try --no-reshard-alias, or leave parameters out."
        )
    if engine == "out-of-process" and config.reshard.reshard_transport in ("auto", "cuda-ipc"):
        yield (
            f"{flag} (parameters): an engine in another process keeps the memory that it reads by CUDA IPC "
            f"(--reshard-transport {config.reshard.reshard_transport}), so nothing would become "
            "free. Try --reshard-transport messages, "
            "or leave parameters out."
        )

"""Rules about mixtures of experts: losses and replay of their routers."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.flags import flag_name
from megarl.config.hf_config import ModelShape
from megarl.config.schema import MoEConfig, TrainConfig


def expert_findings(config: TrainConfig, shapes: list[ModelShape]) -> Iterator[str]:
    """Every rule that the job breaks.

    Args:
        shapes: of the models that are trained, as far as their config.json could be used."""
    yield from _dense(config.experts, shapes)
    yield from _balance(config.experts)
    yield from _replay(config)


def _dense(experts: MoEConfig, shapes: list[ModelShape]) -> Iterator[str]:
    if not shapes or any(shape.is_moe for shape in shapes):
        return
    default = MoEConfig()
    for field in (
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_routing_replay",
    ):
        if (value := getattr(experts, field)) != getattr(default, field):
            yield (
                f"--{flag_name(field)} ({value}): needs a mixture of experts, and "
                f"{shapes[0].model_type} is none. Leave it out."
            )


def _balance(experts: MoEConfig) -> Iterator[str]:
    kind, coeff = experts.moe_router_load_balancing_type, experts.moe_aux_loss_coeff
    if kind == "none" and coeff:
        yield (
            f"--moe-aux-loss-coeff ({coeff:g}): has no effect without "
            "--moe-router-load-balancing-type. Leave it out, or try "
            "--moe-router-load-balancing-type seq_aux_loss."
        )
    if kind != "none" and not coeff:
        yield (
            f"--moe-router-load-balancing-type ({kind}): has no effect with --moe-aux-loss-coeff "
            "0. Try --moe-aux-loss-coeff 1e-3."
        )


def _replay(config: TrainConfig) -> Iterator[str]:
    source = config.experts.moe_routing_replay
    if source == "engine" and not config.rollout.enable_prefix_caching:
        yield (
            "--moe-routing-replay (engine): vLLM tells which experts it chose with its prefix cache "
            "only. Leave "
            "--no-rollout-enable-prefix-caching out, or try --moe-routing-replay policy."
        )
    if source != "none" and not config.algorithm.needs_rollout:
        yield (
            f"--moe-routing-replay ({source}): there are no old log-probs in supervised "
            "fine-tuning. Leave it out."
        )

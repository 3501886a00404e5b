"""Rules about --rollout-backend: a flag that the backend cannot follow is an error, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.errors import Errors
from megarl.config.flags import flag_name
from megarl.config.rollout_backends import rollout_backend
from megarl.config.rules_layout import Job


def backend_options(job: Job) -> Errors:
    """Yield an error per flag of the engines that --rollout-backend cannot follow."""
    for flag, value, rule, advice in _unable(job):
        yield f"{flag} ({value}): {rule}. {advice}, or try --rollout-backend vllm."


def _unable(job: Job) -> Iterator[tuple[str, object, str, str]]:
    """Yield (flag, value, rule, advice) of each flag that the backend cannot follow."""
    rollout, backend = job.config.rollout, rollout_backend(job.config)
    name, leave_out = f"--rollout-backend {rollout.backend}", "Leave it out"
    tp = rollout.tensor_parallel_size
    if tp > 1 and not backend.splits_tensors:
        rule = f"with {name} each engine is whole on one rank"
        yield "--rollout-tensor-parallel-size", tp, rule, "Try --rollout-tensor-parallel-size 1"
    if rollout.block_size is not None and not backend.has_blocks:
        rule = f"the KV cache of {name} has no blocks"
        yield "--rollout-block-size", rollout.block_size, rule, leave_out
    if rollout.enforce_eager is False and not backend.has_graphs:
        yield "--no-rollout-enforce-eager", False, f"{name} has no CUDA graphs and is not compiled", leave_out
    if job.config.experts.moe_routing_replay == "engine" and not backend.tells_experts:
        rule = f"{name} does not report the experts that it chose"
        yield "--moe-routing-replay", "engine", rule, "Try --moe-routing-replay policy"
    if not backend.takes_arguments:
        for argument, value in rollout.engine_args.items():
            flag = f"--{flag_name(argument, 'rollout-')}"
            yield flag, value, f"is an argument of vLLM, and the engine is that of {name}", leave_out

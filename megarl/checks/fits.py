"""Check that a job fits into memory, and format the table of the memory that its ranks need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.checks.machine import Machine
from megarl.checks.memory import (
    PHASES,
    Part,
    Parts,
    engine_bytes,
    estimate,
    longest_sequence_bytes,
    peak_bytes,
    peak_phase,
    phase_bytes,
    roles_of,
)
from megarl.config.check import job_errors
from megarl.config.errors import Errors, divisors
from megarl.config.flags import ROLES, flag_name
from megarl.config.kv_cache import GPU_MEMORY_UTILIZATION, free_gpu_memory_fraction
from megarl.config.rollout_backends import rollout_backend
from megarl.config.schema import ParallelConfig, TrainConfig

_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_PHASE_NAMES = {
    "rollout": "the rollout",
    "log-probs": "the log-probs",
    "update": "an update",
    "sync": "a weight sync",
}


def memory_errors(
    config: TrainConfig, parts: Parts, machine: Machine, ranks_per_node: int, new_run: bool = True
) -> Errors:
    """Yield errors if a step needs more memory than the machine has, or an engine cannot hold one sequence.

    The first error names the smallest change of flags that was computed to fit."""
    found = _shortage(parts, machine, ranks_per_node)
    if found is None:
        yield from _cache_errors(config, parts, machine)
        return

    def fits(changed: TrainConfig) -> tuple[bool, _Shortage | None]:
        """Return whether a configuration fits into memory and breaks no rule, and the shortage of memory, if
        there is one."""
        # first, because sizes that do not divide the ranks have no estimate
        if job_errors(changed, len(parts), new_run):
            return False, None
        needed = estimate(changed, len(parts), machine, new_run)
        if (missing := _shortage(needed, machine, ranks_per_node)) is not None:
            return False, missing
        return not any(_cache_errors(changed, needed, machine)), None

    advice = "Use a smaller model, or more or larger machines."
    for flags, changed in _changes(config, len(parts)):
        is_fit, missing = fits(changed)
        if missing is not None:
            smaller = _smaller_cache(changed, len(parts), machine, missing)
            if smaller is not None:
                flags, is_fit = f"{smaller[0]} {flags}".strip(), fits(smaller[1])[0]
        if is_fit:
            advice = f"Try {flags}."
            break
    elsewhere = "" if machine.has_gpu else " A job for GPUs: megarl check --gpu-memory GB."
    yield (
        f"--model ({config.model.model}): {found.who} {gb(found.needed)} GB {found.when}, of "
        f"{gb(found.there)} GB. {advice}{elsewhere}"
    )


@dataclass(frozen=True, slots=True)
class _Shortage:
    """A memory shortage: who needs how many bytes, how many exist, and in which phase of a step."""

    who: str
    when: str
    needed: int
    there: int
    num_ranks: int = 1

    @property
    def excess_of_rank(self) -> int:
        return -(-(self.needed - self.there) // self.num_ranks)


def _shortage(parts: Parts, machine: Machine, ranks_per_node: int) -> _Shortage | None:
    """Return the shortage of one rank on its GPU, or on a CPU of all ranks of a machine together; None if the
    memory suffices."""
    needs = {rank: peak_bytes(of_rank) for rank, of_rank in parts.items()}
    worst = max(needs, key=needs.__getitem__)
    if machine.has_gpu:
        who, here, there = f"on its GPU rank {worst} needs", [needs[worst]], machine.gpu_bytes
    else:
        here = [size for rank, size in needs.items() if rank < ranks_per_node]
        who = f"on this machine {len(here)} {'ranks need' if len(here) > 1 else 'rank needs'}"
        there = machine.ram_bytes
    when = f"during {_PHASE_NAMES[peak_phase(parts[worst])]}"
    is_short = there is not None and sum(here) > there
    return _Shortage(who, when, sum(here), there, len(here)) if is_short else None


def _changes(config: TrainConfig, world_size: int) -> Iterator[tuple[str, TrainConfig]]:
    """Yield (flags, configuration with these flags) of changes that may save memory, the smallest first.

    Changes that cost time come before changes of numbers or layout."""
    now = config.actor.tensor_model_parallel_size
    larger = [] if config.others else [tp for tp in divisors(world_size) if tp > now]
    for tp in [now, *larger]:
        flags, changed = "", config
        if tp > now:
            flags, split = (
                f"--tensor-model-parallel-size {tp}",
                _megatron_roles(config, tensor_model_parallel_size=tp),
            )
            if rollout_backend(config).splits_tensors:
                flags += f" --rollout-tensor-parallel-size {tp}"
                split["rollout"] = replace(config.rollout, tensor_parallel_size=tp)
            changed = replace(config, **split)
        yield from _cheaper_updates(flags, changed)
        if not config.model.bf16:
            half = replace(changed, model=replace(config.model, bf16=True))
            yield from _cheaper_updates(f"--bf16 {flags}".strip(), half)


def _cheaper_updates(flags: str, config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield (flags, configuration): first as given, then with recomputed activations, then also with shorter
    micro-batches."""
    yield flags, config
    if config.actor.recompute_granularity is None:
        roles = _megatron_roles(
            config, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
        flags, config = f"{flags} {_RECOMPUTE}".strip(), replace(config, **roles)
        yield flags, config
    tokens = config.batch.max_tokens_per_micro_batch
    while tokens // 2 >= config.sampling.max_length:
        tokens //= 2
        shorter = replace(config.batch, max_tokens_per_micro_batch=tokens)
        yield f"{flags} --max-tokens-per-micro-batch {tokens}".strip(), replace(config, batch=shorter)


def _megatron_roles(config: TrainConfig, **changes: object) -> dict[str, ParallelConfig]:
    """Return role -> its `ParallelConfig` with these changes, for the roles that Megatron runs."""
    roles = {role: getattr(config, role) for role in ROLES}
    return {role: replace(parallel, **changes) for role, parallel in roles.items() if parallel is not None}


def _smaller_cache(
    config: TrainConfig, world_size: int, machine: Machine, shortage: _Shortage
) -> tuple[str, TrainConfig] | None:
    """Return (flags, configuration) with a KV cache that is smaller by the missing bytes; None if the cache
    is not that large, or if no flag sets its size."""
    rollout, given = config.rollout, config.rollout.kv_cache_memory_bytes
    if given is not None:
        name, size = "kv_cache_memory_bytes", (given - shortage.excess_of_rank) // 10**6 * 10**6
    elif machine.has_gpu:
        if free_gpu_memory_fraction(config, world_size) is not None:
            return None  # the cache takes no more than is free
        share = rollout.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
        share -= shortage.excess_of_rank / machine.gpu_bytes
        name, size = "gpu_memory_utilization", math.floor(100 * share) / 100
    else:
        return None
    if not config.algorithm.needs_rollout or size <= 0:
        return None
    smaller = replace(config, rollout=replace(rollout, **{name: size}))
    return f"--{flag_name(name, 'rollout-')} {size}", smaller


def _cache_errors(config: TrainConfig, parts: Parts, machine: Machine) -> Errors:
    """Yield an error if an engine's KV cache cannot hold one sequence of full length.

    vLLM refuses to start in that case."""
    if not config.algorithm.needs_rollout or config.others or machine.has_gpu and machine.gpu_bytes is None:
        return
    one = longest_sequence_bytes(config, machine)
    for rank, of_rank in parts.items():
        for part in of_rank:
            if part.name == "KV cache" and part.bytes < one:
                yield _no_room_for_a_sequence(config, rank, len(parts), part.bytes, one, machine)
                return


def _no_room_for_a_sequence(
    config: TrainConfig, rank: int, world_size: int, cache: int, one: int, machine: Machine
) -> str:
    said = (
        f"leaves {gb(cache)} GB of KV cache on rank {rank}, and one sequence of "
        f"{config.sampling.max_length} tokens needs {gb(one)} GB"
    )
    given, fraction = config.rollout.kv_cache_memory_bytes, free_gpu_memory_fraction(config, world_size)
    if given is not None:
        return (
            f"--rollout-kv-cache-memory-bytes ({given}): {said}. Try --rollout-kv-cache-memory-bytes {one}."
        )
    if fraction is not None:
        advice = "Try --offload gradients optimizer, or a larger --rollout-tensor-parallel-size."
        if cache and one * fraction <= cache:
            advice = (
                f"Try --rollout-free-gpu-memory-fraction {math.ceil(100 * fraction * one / cache) / 100:g}."
            )
        return f"--rollout-free-gpu-memory-fraction ({fraction:g}): {said}. {advice}"
    share = config.rollout.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    needed = math.ceil(100 * (engine_bytes(config, world_size, machine) + one) / machine.gpu_bytes) / 100
    advice = (
        f"Try --rollout-gpu-memory-utilization {needed:g}."
        if needed <= 1
        else "Try a larger --rollout-tensor-parallel-size."
        if rollout_backend(config).splits_tensors
        else "Try --rollout-backend vllm and a larger --rollout-tensor-parallel-size."
    )
    return f"--rollout-gpu-memory-utilization ({share:g}): {said}. {advice}"


def memory_table(parts: Parts, machine: Machine) -> list[str]:
    """Return the lines of the memory table: one row per group of equal ranks, followed by its parts."""
    alike: dict[tuple[Part, ...], list[int]] = {}
    for rank, of_rank in parts.items():
        alike.setdefault(of_rank, []).append(rank)
    place = "GPU" if machine.has_gpu else "memory"
    lines = [f"{place} of each rank, GB:  " + "  ".join(f"{phase:>9}" for phase in PHASES)]
    width = len(lines[0]) - 11 * len(PHASES)
    for of_rank, ranks in alike.items():
        lines.append(
            f"  {_ranks(ranks):<{width - 2}}"
            + "  ".join(f"{gb(phase_bytes(of_rank, phase)):>9}" for phase in PHASES).rjust(11 * len(PHASES))
        )
        for role in roles_of(of_rank):
            own = [part for part in of_rank if part.role == role]
            lines.append(f"    {role}: " + ", ".join(map(_described, own)))
    return lines


def _described(part: Part) -> str:
    of = " (offloaded)" if part.offloaded else f" ({part.during})" if part.during is not None else ""
    return f"{part.name} {gb(part.bytes)}{of}"


def _ranks(ranks: Sequence[int]) -> str:
    whole = list(range(ranks[0], ranks[-1] + 1)) == list(ranks)
    text = (
        f"{ranks[0]}-{ranks[-1]}"
        if whole and len(ranks) > 1
        else ",".join(map(str, ranks[:8])) + (",..." if len(ranks) > 8 else "")
    )
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def gb(size: int) -> str:
    """Format bytes as units of 10^9 bytes, e.g. '1.23'. Small sizes get more digits."""
    return f"{size / 1e9:.2f}" if size >= 1e7 else f"{size / 1e9:.5f}" if size else "0"

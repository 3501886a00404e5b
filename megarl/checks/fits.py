"""Whether a job's memory is there, and what it amounts to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megarl.checks.machine import Machine
from megarl.checks.memory import PHASES, Part, Parts, certain_bytes, estimate, phase_bytes, roles_of
from megarl.config.check import job_findings
from megarl.config.check_parallel import divisors
from megarl.config.schema import TrainConfig

_SPLIT = ("actor", "critic", "reference", "reward")


def memory_findings(
    config: TrainConfig, parts: Parts, machine: Machine, ranks_per_node: int, new_run: bool = True
) -> Iterator[str]:
    """One if what is certain alone cannot fit, with the least change that was computed to fit."""
    found = _shortage(parts, machine, ranks_per_node)
    if found is None:
        return
    who, needed, there = found
    advice = "Use a smaller model, or more or larger machines."
    for flags, changed in _changes(config, len(parts)):
        if job_findings(changed, len(parts), new_run):
            continue
        if _shortage(estimate(changed, len(parts), machine, new_run), machine, ranks_per_node) is None:
            advice = f"Try {flags}."
            break
    elsewhere = "" if machine.has_gpu else " A job for GPUs: megarl check --gpu-memory GB."
    yield f"--model ({config.model.model}): {who} {gb(needed)} GB for weights, gradients, optimizer and engine alone, of {gb(there)} GB. {advice}{elsewhere}"


def _shortage(parts: Parts, machine: Machine, ranks_per_node: int) -> tuple[str, int, int] | None:
    """(who needs, bytes needed, bytes there) of what cannot fit: one rank on its GPU, or on a CPU all of a machine together."""
    needs = {rank: certain_bytes(of_rank) for rank, of_rank in parts.items()}
    if machine.has_gpu:
        rank = max(needs, key=needs.__getitem__)
        who, needed, there = f"on its GPU rank {rank} needs", needs[rank], machine.gpu_bytes
    else:
        here = [size for rank, size in needs.items() if rank < ranks_per_node]
        who, needed, there = (
            f"on this machine {len(here)} {'ranks need' if len(here) > 1 else 'rank needs'}",
            sum(here),
            machine.ram_bytes,
        )
    return (who, needed, there) if there is not None and needed > there else None


def _changes(config: TrainConfig, world_size: int) -> Iterator[tuple[str, TrainConfig]]:
    """(flags, the configuration with them), the least first."""
    half = replace(config, model=replace(config.model, bf16=True))
    if not config.model.bf16:
        yield "--bf16", half
    if config.others:
        return
    for tp in [tp for tp in divisors(world_size) if tp > config.actor.tensor_model_parallel_size]:
        split = {
            role: replace(getattr(config, role), tensor_model_parallel_size=tp)
            for role in _SPLIT
            if getattr(config, role) is not None
        }
        split["rollout"] = replace(config.rollout, tensor_parallel_size=tp)
        flags = f"--tensor-model-parallel-size {tp} --rollout-tensor-parallel-size {tp}"
        yield flags, replace(config, **split)
        if not config.model.bf16:
            yield f"--bf16 {flags}", replace(half, **split)


def memory_table(parts: Parts, machine: Machine) -> list[str]:
    """Ranks that hold the same are one row; below each what it is made of."""
    alike: dict[tuple[Part, ...], list[int]] = {}
    for rank, of_rank in parts.items():
        alike.setdefault(of_rank, []).append(rank)
    place = "GPU" if machine.has_gpu else "memory"
    lines = [
        f"{place} of each rank, GB, without activations:  " + "  ".join(f"{phase:>9}" for phase in PHASES)
    ]
    width = len(lines[0]) - 11 * len(PHASES)
    for of_rank, ranks in alike.items():
        lines.append(
            f"  {_ranks(ranks):<{width - 2}}"
            + "  ".join(f"{gb(phase_bytes(of_rank, phase)):>9}" for phase in PHASES).rjust(11 * len(PHASES))
        )
        for role in roles_of(of_rank):
            own = [part for part in of_rank if part.role == role]
            lines.append(
                f"    {role}: "
                + ", ".join(
                    f"{part.name} {gb(part.bytes)}{' (offloaded)' if part.offloaded else ''}" for part in own
                )
            )
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    whole = list(range(ranks[0], ranks[-1] + 1)) == list(ranks)
    text = (
        f"{ranks[0]}-{ranks[-1]}"
        if whole and len(ranks) > 1
        else ",".join(map(str, ranks[:8])) + (",..." if len(ranks) > 8 else "")
    )
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def gb(size: int) -> str:
    """'1.23': of 10^9 bytes; small models get more digits."""
    return f"{size / 1e9:.2f}" if size >= 1e7 else f"{size / 1e9:.5f}" if size else "0"

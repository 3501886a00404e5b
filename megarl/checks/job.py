"""Everything at once: what `megarl check` reports and every job goes through first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.checks.disk import copy_bytes, disk_findings, disk_line
from megarl.checks.fits import gb, memory_findings, memory_table
from megarl.checks.machine import Machine, free_bytes, this_machine
from megarl.checks.memory import estimate
from megarl.checks.preview import preview
from megarl.checks.syncs import sync_findings, unplanned
from megarl.config.check import job_findings
from megarl.config.check_actors import of_all_actors
from megarl.config.errors import raise_findings
from megarl.config.mesh import role_meshes
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.config.versions import version_notes


@dataclass(frozen=True, slots=True)
class Report:
    """
    Args:
        findings: what is wrong, each `flag (value): rule. Try ...`.
        lines: what the job amounts to; empty if there are findings."""

    findings: tuple[str, ...]
    lines: tuple[str, ...]


def check_everything(
    config: TrainConfig, world_size: int, new_run: bool = True, ranks_per_node: int | None = None
) -> None:
    """Raises: ConfigError with everything that is wrong."""
    raise_findings(examine(config, world_size, new_run, ranks_per_node).findings)


def examine(
    config: TrainConfig,
    world_size: int,
    new_run: bool = True,
    ranks_per_node: int | None = None,
    machine: Machine | None = None,
) -> Report:
    """
    Args:
        new_run: --save is going to be written, so it must be free and have room.
        ranks_per_node: ranks of this machine. Default: all.
        machine: default: this one."""
    findings = job_findings(config, world_size, new_run)
    previews = {suffix: preview(of_actor) for suffix, of_actor in configs_of_actors(config).items()}
    of_data = iter(previews.values())
    findings += of_all_actors(config, lambda _: next(of_data).findings)
    if findings:
        return Report(tuple(findings), ())  # what follows is about layouts that are right
    machine = machine or this_machine()
    free = free_bytes(Path(config.run.save)) if new_run else None
    parts = estimate(config, world_size, machine, new_run)
    findings = [
        *sync_findings(config, world_size),
        *memory_findings(config, parts, machine, ranks_per_node or world_size, new_run),
        *disk_findings(config, free),
    ]
    lines = [
        _summary(config, world_size),
        *dict.fromkeys(line for seen in previews.values() for line in seen.lines),
        *_sync_lines(config),
        *([f"--save: {disk_line(config, free)}"] if new_run else []),
        *memory_table(parts, machine),
        *_copy_line(config, world_size),
        *(f"note: {note}" for note in version_notes()),
    ]
    return Report(tuple(findings), () if findings else tuple(lines))


def _summary(config: TrainConfig, world_size: int) -> str:
    batch, rolls_out = config.batch, config.algorithm.needs_rollout
    samples = batch.num_prompts * batch.num_samples_per_prompt if rolls_out else batch.global_batch_size
    updates = samples // batch.global_batch_size * (batch.num_epochs if rolls_out else 1)
    actors = f"{len(config.others) + 1} actors, of the first: " if config.others else ""
    dp = role_meshes(config, world_size)["actor"].dp
    return f"ok: world size {world_size}, {actors}data-parallel size {dp}, {batch.train_iters} steps, per step {samples} samples and {updates} updates"


def _copy_line(config: TrainConfig, world_size: int) -> Iterator[str]:
    if config.checkpoint.save_interval:
        yield f"  while a checkpoint is written, copies in host memory: up to {gb(copy_bytes(config, world_size))} on a rank"


def _sync_lines(config: TrainConfig) -> Iterator[str]:
    if (name := unplanned(config)) is not None:
        yield f"weight sync: not planned here, as the engine's layout of {name} is known only when it has started"

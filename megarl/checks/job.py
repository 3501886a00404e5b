"""Run all checks of a job, for `megarl check` and for the start of every job."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.algorithms.base import algorithm_of
from megarl.checks.disk import copy_bytes, disk_errors, disk_line, save_errors
from megarl.checks.engine import engine_errors
from megarl.checks.fits import gb, memory_errors, memory_table
from megarl.checks.machine import Machine, free_bytes, this_machine
from megarl.checks.memory import ESTIMATED, Part, Parts, estimate
from megarl.checks.model_notes import model_notes
from megarl.checks.preview import preview
from megarl.checks.profile import profile_errors
from megarl.checks.replay import replay_errors
from megarl.checks.syncs import sync_errors, unplanned
from megarl.checks.weights import weight_errors
from megarl.config.check import job_errors, of_all_actors
from megarl.config.environments import flags_of_environments
from megarl.config.errors import Errors, raise_errors
from megarl.config.flags import algorithm_name
from megarl.config.installed import version_notes
from megarl.config.mesh import role_meshes
from megarl.config.roles import configs_of_actors
from megarl.config.rules_algorithm import condition_notes
from megarl.config.rules_files import checkpoint_notes
from megarl.config.rules_streaming import correction_warnings
from megarl.config.schema import TrainConfig
from megarl.config.unused_flags import unused_flags

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """The errors of all checks of a job, and the lines of its summary.

    Args:
        errors: errors, each `flag (value): rule. Try ...`.
        estimates: errors that rest on an estimate of the activations, in the same form.
        warnings: what makes the job slow or useless, or is itself useless, without being wrong; in the same
            form.
        lines: a summary of the job, as far as the errors permit one. The first line begins with ok or not
            ok.
        is_complete: whether all checks were run. Errors in layouts, flags or data leave the others out."""

    errors: tuple[str, ...]
    lines: tuple[str, ...]
    estimates: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    is_complete: bool = True


def check_everything(
    config: TrainConfig, world_size: int, new_run: bool = True, ranks_per_node: int | None = None
) -> None:
    """Raise ConfigError with all errors. Log the warnings, and a warning for each error that is only
    estimated."""
    report = examine(config, world_size, new_run, ranks_per_node)
    raise_errors(report.errors, report.is_complete)
    for warning in report.warnings:
        logger.warning("warning: %s", warning)
    for error in report.estimates:
        logger.warning("by an estimate of the activations this job does not fit. %s", error)


def examine(
    config: TrainConfig,
    world_size: int,
    new_run: bool = True,
    ranks_per_node: int | None = None,
    machine: Machine | None = None,
    calls_reward: bool = False,
) -> Report:
    """Run all checks of a job and return a `Report`, which holds the errors; they are not raised.

    Args:
        new_run: whether --save will be written, so it must be free and have room.
        ranks_per_node: number of ranks on this machine. By default --nnodes divides the ranks.
        machine: the machine to check for. The default is this machine.
        calls_reward: whether to call the user's reward function, as the start of a job does later."""
    errors = job_errors(config, world_size, new_run)
    previews = {
        suffix: preview(of_actor, calls_reward and not errors)
        for suffix, of_actor in configs_of_actors(config).items()
    }
    of_data = iter(previews.values())
    errors += of_all_actors(config, lambda _: next(of_data).errors)
    if errors:
        return Report(
            tuple(errors), (), is_complete=False
        )  # the checks below assume that the layouts are right
    machine = machine or this_machine()
    ranks_per_node = ranks_per_node or -(-world_size // config.placement.nnodes)
    free = free_bytes(Path(config.run.save)) if new_run else None
    of_disk = [*(save_errors(config) if new_run else ()), *disk_errors(config, free)]
    parts = estimate(config, world_size, machine, new_run)
    errors = [
        *weight_errors(config, new_run),
        *engine_errors(config, world_size, machine),
        *(profile_errors(config, machine) if new_run else ()),
        *(replay_errors(config, world_size) if new_run else ()),
        *_gpu_errors(config, world_size, new_run, ranks_per_node, machine),
        *sync_errors(config, world_size),
        *(of_disk if machine.is_this else ()),
    ]
    of_memory = tuple(memory_errors(config, parts, machine, ranks_per_node, new_run))
    is_certain = any(
        memory_errors(config, _without_estimates(config, parts), machine, ranks_per_node, new_run)
    )
    errors += of_memory if is_certain else ()
    estimates = () if is_certain else of_memory
    warnings = (
        *_core_warnings(config, world_size, new_run, ranks_per_node, machine),
        *(of_all_actors(config, _group_warnings) if new_run else ()),
        *(of_all_actors(config, correction_warnings) if new_run else ()),
        *(unused_flags(config) if new_run else ()),
    )
    notes = [
        *(f"on this machine {error}" for error in of_disk if not machine.is_this),
        *dict.fromkeys(
            note for of_actor in configs_of_actors(config).values() for note in model_notes(of_actor)
        ),
        *dict.fromkeys(note for seen in previews.values() for note in seen.notes),
        *(of_all_actors(config, condition_notes) if new_run else ()),
        *(checkpoint_notes(config) if new_run else ()),
        *(_untried(config) if new_run else ()),
        *version_notes(),
    ]
    lines = [
        _summary(config, world_size, is_ok=not errors and not estimates),
        *dict.fromkeys(line for seen in previews.values() for line in seen.lines),
        *_sync_lines(config),
        *([f"--save: {disk_line(config, free)}"] if new_run else []),
        *memory_table(parts, machine),
        *_copy_line(config, world_size),
        *(f"warning: {warning}" for warning in warnings),
        *(f"note: {note}" for note in notes),
    ]
    return Report(tuple(errors), tuple(lines), estimates, warnings)


def _without_estimates(config: TrainConfig, parts: Parts) -> Parts:
    """Return the parts of memory whose sizes follow from layouts and flags: all but activations, CUDA graphs
    and the margin.

    What an engine does not need for them, a KV cache gets whose size is a share of the GPU."""
    is_share = config.rollout.kv_cache_memory_bytes is None
    return {rank: tuple(_certain(of_rank, is_share)) for rank, of_rank in parts.items()}


def _certain(parts: Sequence[Part], is_share: bool) -> Iterator[Part]:
    estimated = [part for part in parts if part.name in ESTIMATED and part.role.startswith("rollout")]
    more = sum(part.bytes for part in estimated) if is_share else 0
    for part in parts:
        if part.name == "KV cache":
            yield replace(part, bytes=part.bytes + more)
        elif part.name not in ESTIMATED:
            yield part


def _untried(config: TrainConfig) -> Iterator[str]:
    """Yield notes about what a user may think that the job or its check does, and that it does not."""
    if config.data.eval_data and not config.run.eval_interval and algorithm_of(config).needs_rollout:
        yield (
            "--eval-data is given and --eval-interval is 0: the job evaluates nothing. Add --eval-interval 10, "
            "or evaluate its run with megarl eval"
        )
    if config.episodes.env:
        model, data = ["--model", config.model.model], ["--data", *config.data.train_data[:1]]
        words = shlex.join([*model, *flags_of_environments(config.episodes), *data])
        yield (
            f"--env ({' '.join(config.episodes.env)}): is played when the job starts, not by this check. megarl "
            f"chat {words} plays an episode"
        )


def _gpu_errors(config: TrainConfig, world_size: int, new_run: bool, ranks: int, machine: Machine) -> Errors:
    """Yield an error if there are more ranks than GPUs on this machine."""
    if machine.num_gpus is None or ranks <= machine.num_gpus:
        return
    advice = _fewer_ranks(config, world_size, new_run, ranks, machine.num_gpus)
    yield (
        f"--nproc-per-node ({ranks}): needs as many GPUs on this machine, one for each rank, and it has "
        f"{machine.num_gpus}. {advice}"
    )


def _group_warnings(config: TrainConfig) -> Errors:
    """Yield a warning if an algorithm that compares the samples of a prompt gets one sample of each."""
    algorithm = algorithm_of(config)
    group_size = config.batch.num_samples_per_prompt + algorithm.greedy_samples
    if algorithm.relative_to_group and group_size == 1:
        yield (
            f"--num-samples-per-prompt (1): {algorithm_name(type(config.algorithm))} compares the samples of "
            "one prompt with each other, so with one sample every advantage is 0 and nothing is learnt from "
            "rewards. Try --num-samples-per-prompt 8."
        )


def _core_warnings(
    config: TrainConfig, world_size: int, new_run: bool, ranks: int, machine: Machine
) -> Errors:
    """Yield a warning if there are more ranks than CPU cores on a machine without GPUs.

    A job of several machines is often checked on one that takes no part in it."""
    if machine.has_gpu or machine.num_cores is None or ranks <= machine.num_cores or ranks < world_size:
        return
    cores = f"{machine.num_cores} CPU core{'s' if machine.num_cores > 1 else ''}"
    yield (
        f"--nproc-per-node ({ranks}): this machine has {cores}, so the ranks wait for each other, and a step "
        f"takes longer than with {machine.num_cores}. "
        f"{_fewer_ranks(config, world_size, new_run, ranks, machine.num_cores)}"
    )


def _fewer_ranks(config: TrainConfig, world_size: int, new_run: bool, ranks: int, most: int) -> str:
    """Return a sentence that proposes the largest number of ranks up to `most` that the layout permits."""
    fewer = range(most, 0, -1) if ranks == world_size else ()
    fitting = next((n for n in fewer if not job_errors(config, n, new_run)), None)
    if fitting is not None:
        return f"Try --nproc-per-node {fitting}."
    return "Use a machine with more, or smaller parallel sizes and lists of ranks."


def _summary(config: TrainConfig, world_size: int, is_ok: bool) -> str:
    batch, rolls_out = config.batch, config.algorithm.needs_rollout
    samples, updates = batch.global_batch_size * algorithm_of(config).samples_per_row, 1
    if rolls_out:
        samples = batch.num_prompts * batch.num_samples_per_prompt
        updates = samples // batch.global_batch_size * batch.num_epochs
    noun = "updates" if updates > 1 else "update"
    actors = f"{len(config.others) + 1} actors, of the first: " if config.others else ""
    dp = role_meshes(config, world_size)["actor"].dp
    return (
        f"{'ok' if is_ok else 'not ok'}: world size {world_size}, {actors}data-parallel size "
        f"{dp}, {batch.train_iters} steps, per step {samples} samples and {updates} {noun}"
    )


def _copy_line(config: TrainConfig, world_size: int) -> Iterator[str]:
    if config.checkpoint.save_interval:
        yield (
            "  while a checkpoint is written, copies in host memory: up to "
            f"{gb(copy_bytes(config, world_size))} on a rank"
        )


def _sync_lines(config: TrainConfig) -> Iterator[str]:
    if (name := unplanned(config)) is not None:
        yield (
            f"weight sync: not planned here, as the engine's layout of {name} is known only when "
            "it has started"
        )

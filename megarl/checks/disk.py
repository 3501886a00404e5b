"""Check that a run can write its files and has the disk space for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megarl.checks.fits import gb
from megarl.checks.memory import MASTER_BYTES, MOMENT_BYTES
from megarl.checks.sizes import canonical_elements, megatron_held
from megarl.config.errors import Errors
from megarl.config.mesh import MeshSpec, actor_meshes
from megarl.config.roles import configs_of_actors, trained_models
from megarl.config.rules_files import free_name
from megarl.config.schema import TrainConfig
from megarl.files.checkpoints import checkpoints_in, found_by, step_of
from megarl.files.writing import obstacle
from megarl.reshard.report import ITEMSIZE


def save_errors(config: TrainConfig) -> Errors:
    """Yield an error if this machine cannot create or write the run folder, with a folder that works."""
    folder = Path(config.run.save)
    if (why := obstacle(folder)) is not None:
        beside, here = free_name(folder), free_name(Path("runs") / (folder.name or "run"))
        usable = next((path for path in (beside, here) if obstacle(path) is None), None)
        advice = "Name a folder that can be created." if usable is None else f"Try --save {usable}."
        yield f"--save ({folder}): cannot be written: {why}. {advice}"


def disk_errors(config: TrainConfig, free: int | None) -> Errors:
    """Yield an error if the run folder's file system lacks room for checkpoints and exports.

    They are those that exist at the same time. What the run folder already holds needs no further room."""
    if free is not None and _run_bytes(config) > free:
        fewer = replace(config, checkpoint=replace(config.checkpoint, keep=1))
        advice = "Try --keep 1." if _run_bytes(fewer) <= free else "Name a folder on another file system."
        yield f"--save ({config.run.save}): {disk_line(config, free)}. {advice}"


def _run_bytes(config: TrainConfig) -> int:
    return new_checkpoints(config) * checkpoint_bytes(config) + export_bytes(config)


def disk_line(config: TrainConfig, free: int | None) -> str:
    count, size, export = new_checkpoints(config), checkpoint_bytes(config), export_bytes(config)
    more = "more " if checkpoints_in(Path(config.run.save)) else ""
    checkpoints = f"{count} {more}checkpoint{'s' if count > 1 else ''} of {gb(size)} GB and " if count else ""
    return f"writes {checkpoints}exports of {gb(export)} GB" + (
        "" if free is None else f", and {gb(free)} GB are free"
    )


def new_checkpoints(config: TrainConfig) -> int:
    """Return the largest number of checkpoints at one time that the run folder does not hold yet.

    At one time there are the kept ones, the best one, and the one being written. Old ones are removed only
    when a new one is complete, so a job that writes any needs room for at least one."""
    checkpoint = config.checkpoint
    at_once = checkpoint.keep + 1 + (checkpoint.best_metric is not None)
    held = len(checkpoints_in(Path(config.run.save)))
    return min(_times_due(config, checkpoint.save_interval), max(1, at_once - held))


def _times_due(config: TrainConfig, interval: int) -> int:
    """Return how often the job's remaining steps write what is written every `interval` steps and after the
    last one; 0 if `interval` is 0."""
    steps, load = config.batch.train_iters, config.checkpoint.load
    found = found_by(load) if load is not None else []
    begin = step_of(found[0]) if found else 0
    return -(-steps // interval) - begin // interval if interval and begin < steps else 0


def checkpoint_bytes(config: TrainConfig) -> int:
    """Return the bytes of one checkpoint with all trained roles."""
    return sum(size for _, _, size in _checkpoints(config))


def copy_bytes(config: TrainConfig, world_size: int) -> int:
    """Return the bytes of checkpoint copies in host memory, on the rank that needs most.

    The copies exist while a checkpoint is written. The ranks of a role share its checkpoint."""
    copies = dict.fromkeys(range(world_size), 0)
    for of_actor, role, size in _checkpoints(config):
        ranks = actor_meshes(of_actor, world_size)[role].ranks
        for rank in ranks:
            copies[rank] += size // len(ranks)
    return max(copies.values())


def _checkpoints(config: TrainConfig) -> Iterator[tuple[TrainConfig, str, int]]:
    """Yield (actor, role, bytes of the checkpoint) of each trained role.

    A checkpoint has fp32 weights (master weights under bf16) and moments. With adapters these are the
    adapters' weights and moments, plus the frozen weights."""
    state_bytes = MASTER_BYTES + MOMENT_BYTES
    for of_actor in configs_of_actors(config).values():
        for role, model in trained_models(of_actor).items():
            elements = canonical_elements(model.shape)
            if model.lora.lora_rank:
                adapters = megatron_held(model.shape, MeshSpec((0,)), "grouped", model.lora)[0].adapters
                yield of_actor, role, elements * ITEMSIZE[of_actor.model.dtype] + adapters * state_bytes
            else:
                yield of_actor, role, elements * state_bytes


def export_bytes(config: TrainConfig) -> int:
    """Return the bytes of the exports hf/, hf_critic/, and those of further actors, at one time and without
    those that the run folder holds.

    An export is written beside the one that it replaces, role after role."""
    sizes = {
        f"hf{'' if role == 'actor' else f'_{role}'}{suffix}": canonical_elements(model.shape)
        * ITEMSIZE[of_actor.model.dtype]
        for suffix, of_actor in configs_of_actors(config).items()
        for role, model in trained_models(of_actor).items()
    }
    new = {name: size for name, size in sizes.items() if not Path(config.run.save, name).is_dir()}
    is_repeated = _times_due(config, config.run.export_interval) > 1
    replaced = sizes if is_repeated else sizes.keys() - new.keys()
    return sum(new.values()) + max((sizes[name] for name in replaced), default=0)

"""Check that a run can write its files and has the disk space for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megarl.checks.fits import gb
from megarl.checks.memory import MASTER_BYTES, MOMENT_BYTES
from megarl.checks.sizes import canonical_elements, megatron_held
from megarl.config.errors import Errors
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, actor_meshes
from megarl.config.roles import configs_of_actors
from megarl.config.rules_files import free_name
from megarl.config.schema import LoRAConfig, TrainConfig
from megarl.files.writing import obstacle
from megarl.reshard.report import ITEMSIZE


def save_findings(config: TrainConfig) -> Errors:
    """Yield an error if this machine cannot create or write the run folder, with a folder that works."""
    folder = Path(config.run.save)
    if (why := obstacle(folder)) is not None:
        beside, here = free_name(folder), free_name(Path("runs") / (folder.name or "run"))
        usable = next((path for path in (beside, here) if obstacle(path) is None), None)
        advice = "Name a folder that can be created." if usable is None else f"Try --save {usable}."
        yield f"--save ({folder}): cannot be written: {why}. {advice}"


def disk_findings(config: TrainConfig, free: int | None) -> Errors:
    """Yield an error if the run folder's file system lacks room for checkpoints and exports.

    The checkpoints are those that exist at the same time."""
    needed = checkpoints_at_once(config) * checkpoint_bytes(config) + export_bytes(config)
    if free is not None and needed > free:
        fewer = replace(config, checkpoint=replace(config.checkpoint, keep=1))
        fits = checkpoints_at_once(fewer) * checkpoint_bytes(config) + export_bytes(config) <= free
        advice = "Try --keep 1." if fits else "Name a folder on another file system."
        yield f"--save ({config.run.save}): {disk_line(config, free)}. {advice}"


def disk_line(config: TrainConfig, free: int | None) -> str:
    count, size, export = checkpoints_at_once(config), checkpoint_bytes(config), export_bytes(config)
    checkpoints = f"{count} checkpoint{'s' if count > 1 else ''} of {gb(size)} GB and " if count else ""
    return f"writes {checkpoints}exports of {gb(export)} GB" + (
        "" if free is None else f", and {gb(free)} GB are free"
    )


def checkpoints_at_once(config: TrainConfig) -> int:
    """Return the largest number of checkpoints at one time: the kept, the best, and the one being written."""
    checkpoint = config.checkpoint
    if not checkpoint.save_interval:
        return 0
    made = -(-config.batch.train_iters // checkpoint.save_interval)
    return min(made, checkpoint.keep + 1 + (checkpoint.best_metric is not None))


def checkpoint_bytes(config: TrainConfig) -> int:
    """Return the size of one checkpoint of all trained roles."""
    return sum(
        _of_role(of_actor, *trained)
        for of_actor in configs_of_actors(config).values()
        for trained in _trained(of_actor)
    )


def copy_bytes(config: TrainConfig, world_size: int) -> int:
    """Return the host memory for checkpoint copies on the rank that needs most.

    The copies exist while a checkpoint is written. The ranks of a role share its checkpoint."""
    copies = dict.fromkeys(range(world_size), 0)
    for of_actor in configs_of_actors(config).values():
        meshes = actor_meshes(of_actor, world_size)
        for folder, lora, is_critic in _trained(of_actor):
            ranks = meshes["critic" if is_critic else "actor"].ranks
            for rank in ranks:
                copies[rank] += _of_role(of_actor, folder, lora, is_critic) // len(ranks)
    return max(copies.values())


def _of_role(config: TrainConfig, folder: str, lora: LoRAConfig, is_critic: bool) -> int:
    """Return the checkpoint size of one role: fp32 weights (master weights under bf16) and moments.

    With adapters these are the adapters' weights and moments, plus the frozen weights."""
    shape, state_bytes = ModelShape.load(folder, value_head=is_critic), MASTER_BYTES + MOMENT_BYTES
    elements = canonical_elements(shape)
    if not lora.lora_rank:
        return elements * state_bytes
    adapters = megatron_held(shape, MeshSpec((0,)), "grouped", lora)[0].adapters
    return elements * ITEMSIZE[config.model.dtype] + adapters * state_bytes


def export_bytes(config: TrainConfig) -> int:
    """Return the size of the exports: hf/, hf_critic/, and those of further actors."""
    return sum(
        canonical_elements(ModelShape.load(folder, value_head=is_critic)) * ITEMSIZE[of_actor.model.dtype]
        for of_actor in configs_of_actors(config).values()
        for folder, _, is_critic in _trained(of_actor)
    )


def _trained(config: TrainConfig) -> list[tuple[str, LoRAConfig, bool]]:
    """Return (folder, adapters, whether it is the critic) of each trained role."""
    actor = (config.model.model, config.lora, False)
    critic = (config.model.critic_folder, config.critic_lora, True)
    return [actor] if config.critic is None else [actor, critic]

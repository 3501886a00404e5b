"""Copy weights from an actor into its engines, with one call per role if the two are on different ranks, and
write them to files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megarl.config.mesh import MeshSpec
from megarl.futures import Future
from megarl.runtime.executor import Executor
from megarl.flow import Actor, Metrics, ModelRole, Rollout
from megarl.role_names import TRAINED_KINDS, kind_and_suffix


def send_weights(executor: Executor, meshes: Mapping[str, MeshSpec], version: int, suffix: str) -> None:
    """Let the ranks that hold the actor's weights and have no engine send them, if there are such ranks.
    Ranks with an engine do their part in `sync`.

    Args:
        suffix: suffix of the actor."""
    if set(meshes[f"actor{suffix}"].ranks) - set(meshes[f"rollout{suffix}"].ranks):
        Actor(executor, f"actor{suffix}").send_weights(version)


def sync_weights(
    executor: Executor, meshes: Mapping[str, MeshSpec], version: int, suffix: str = ""
) -> Future[Metrics]:
    """Start to copy an actor's weights into its engines as `version`. Returns the future of the engines'
    ranks."""
    send_weights(executor, meshes, version, suffix)
    return Rollout(executor, f"rollout{suffix}").sync(version)


def export_weights(executor: Executor, meshes: Mapping[str, MeshSpec], folder: Path) -> None:
    """Write the weights of all trained roles in Hugging Face format to hf/, hf_critic/, hf_2/, ... of a
    folder."""
    for role in meshes:
        kind, suffix = kind_and_suffix(role)
        if kind in TRAINED_KINDS:
            name = "hf" if kind == "actor" else f"hf_{kind}"
            ModelRole(executor, role).export_hf(str(folder / f"{name}{suffix}")).result()

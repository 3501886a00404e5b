"""Send weights from an actor into its engines, as two calls if they are on different ranks."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.mesh import MeshSpec
from megarl.futures import Future
from megarl.runtime.executor import Executor
from megarl.flow import Actor, Metrics, Rollout


def send_weights(executor: Executor, meshes: Mapping[str, MeshSpec], version: int, suffix: str) -> None:
    """Call the ranks that hold the weights and have no engine. Ranks with an engine do their part in `sync`.

    Args:
        suffix: suffix of the actor."""
    if set(meshes[f"actor{suffix}"].ranks) - set(meshes[f"rollout{suffix}"].ranks):
        Actor(executor, f"actor{suffix}").send_weights(version)


def sync_weights(
    executor: Executor, meshes: Mapping[str, MeshSpec], version: int, suffix: str = ""
) -> Future[Metrics]:
    """Call the ranks that hold the weights and the ranks that need them. Returns the latter's future."""
    send_weights(executor, meshes, version, suffix)
    return Rollout(executor, f"rollout{suffix}").sync(version)

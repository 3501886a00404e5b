"""Weights from the actor into the engines, as two calls where they are on different ranks."""

from __future__ import annotations

from megarl.config.mesh import MeshSpec
from megarl.driver.executor import Executor, Future


def send_weights(executor: Executor, meshes: dict[str, MeshSpec], version: int) -> None:
    """Call the ranks that hold the weights and have no engine; those with one do their part in `sync`."""
    if set(meshes["actor"].ranks) - set(meshes["rollout"].ranks):
        executor.role("actor").send_weights(version)


def sync_weights(executor: Executor, meshes: dict[str, MeshSpec], version: int) -> Future:
    """Call the ranks that hold the weights and the ranks that need them. Returns the latter's future."""
    send_weights(executor, meshes, version)
    return executor.role("rollout").sync(version)

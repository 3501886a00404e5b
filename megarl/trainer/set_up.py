"""Set the roles of a job up on their ranks, after a test that all nodes share the run folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from megarl.config.mesh import MeshSpec
from megarl.failures import ExplainedError
from megarl.files.writing import writing
from megarl.flow import Actor, PlacedRole, RunFolderReader
from megarl.runtime.executor import Executor
from megarl.runtime.process import NUM_NODES
from megarl.trainer.announce import wait_for_setups
from megarl.trainer.run_folder import Run
from megarl.trainer.state import TrainState
from megarl.trainer.stored_reference import RowSizes, set_up_stored_reference

_SEEN_WITHIN_S = 10.0  # network file systems keep what they know of a folder for some seconds


class FolderNotShared(ExplainedError, RuntimeError):
    """Raised if the node of a rank does not see the run folder in which the driver writes."""

    read_on = "docs/clusters.md, section What every node needs"


def set_up_roles(executor: Executor, state: TrainState, meshes: Mapping[str, MeshSpec], run: Run) -> RowSizes:
    """Build the model or engine of every role, in an order that all ranks share. If the ranks may be on
    other machines than this one, test first that these share the run folder.

    Returns: (length, response length, reward) of the samples of each row, for an algorithm that samples nothing.
    Raises: FolderNotShared; OtherReference."""
    actor, roles, rows = state.first, [*meshes], []
    if actor.config.placement.executor == "ray" or int(os.environ.get(NUM_NODES, "1")) > 1:
        check_folder_is_shared(executor, run.folder)
    if not actor.algorithm.needs_rollout:
        rows = Actor(executor, "actor").load_dataset().first() or []
    if actor.algorithm.precompute_ref_log_probs:
        hidden = actor.hidden_size("reference")
        done = set_up_stored_reference(executor, actor.config, meshes, run, rows, hidden)
        roles = [role for role in roles if role not in done]
    setups = {role: PlacedRole(executor, role).setup() for role in roles}
    wait_for_setups(setups, run.progress.note)
    return rows


def check_folder_is_shared(executor: Executor, folder: Path, wait_s: float = _SEEN_WITHIN_S) -> None:
    """Write a nonce into the run folder and let every rank read it.

    Args:
        wait_s: seconds within which a rank must see the new file.
    Raises: FolderNotShared, which names every node that does not see the nonce."""
    everywhere = "data" if "data" in executor.ranks else "actor"  # the role that is on every rank
    nonce = secrets.token_hex(16)
    path = folder / f".shared_{nonce}"  # a new name, which no file system has noted as missing
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{nonce}\n")
    try:
        answers = RunFolderReader(executor, everywhere).read_nonce(str(path), wait_s).result()
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    blind: dict[tuple[str, str], list[int]] = {}
    for rank, answer in zip(executor.ranks[everywhere], answers, strict=True):
        if answer["nonce"] != nonce:
            blind.setdefault((answer["node"], str(Path(answer["path"]).parent)), []).append(rank)
    if blind:
        raise FolderNotShared("\n".join(_problem(*where, ranks, folder) for where, ranks in blind.items()))


def _problem(node: str, path: str, ranks: list[int], folder: Path) -> str:
    here = socket.gethostname()
    return (
        f"--save ({folder}): node {node} (rank {', '.join(map(str, ranks))}) does not see in {path} what the driver on "
        f"node {here} writes in {folder.absolute()}. Must be a folder that all nodes share under the same path, "
        "because every rank writes its part of a checkpoint there. Try --save on a network file system that is "
        f"mounted on {node} and {here}."
    )

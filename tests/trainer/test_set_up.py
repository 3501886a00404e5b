"""A node that does not see the run folder is named before training. With real nodes: tests/nodes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megarl.flow import Data
from megarl.trainer.set_up import FolderNotShared, check_folder_is_shared
from megarl.workers.run_folder import RunFolderOfRank
from tests.runtime.thread_executor import ThreadExecutor


class OnAnotherNode(RunFolderOfRank):
    """The same folder name on a node that mounts something else there."""

    def __init__(self, mounted: Path) -> None:
        self.mounted = mounted

    def read_nonce(self, path: str, wait_s: float) -> dict[str, str]:
        answer = super().read_nonce(str(self.mounted / Path(path).name), wait_s)
        return answer | {"node": "node1", "path": path}


def executor_of(roles: list[RunFolderOfRank]) -> ThreadExecutor:
    ranks = [*range(len(roles))]
    return ThreadExecutor(
        lambda context: {"data": roles[context.rank]}, {"data": ranks}, len(roles), {"data": Data}
    )


def test_a_shared_folder_is_as_before(tmp_path):
    folder = tmp_path / "runs" / "new"
    executor = executor_of([RunFolderOfRank(), OnAnotherNode(folder)])
    check_folder_is_shared(executor, folder)
    assert not any(folder.iterdir())
    executor.shutdown()


def test_a_folder_that_a_node_does_not_see_is_told_with_node_path_and_ranks(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    executor = executor_of([RunFolderOfRank(), OnAnotherNode(other), OnAnotherNode(other)])
    with pytest.raises(FolderNotShared) as refused:
        check_folder_is_shared(executor, tmp_path, wait_s=0.3)
    assert str(refused.value) == (
        f"--save ({tmp_path}): node node1 (rank 1, 2) does not see in {tmp_path} what the driver on node "
        f"{socket.gethostname()} writes in {tmp_path}. Must be a folder that all nodes share under the same path, "
        "because every rank writes its part of a checkpoint there. Try --save on a network file system that is "
        f"mounted on node1 and {socket.gethostname()}."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    executor.shutdown()

"""The checks of rank 0 before ranks join, with the ranks that torchrun has started.
`pytest tests/trainer/test_rank_checks.py`"""

import pytest

from megarl import train
from tests.e2e.jobs import COMMON, replace_flags

SPLIT = """--actor-tensor-model-parallel-size 2 --rollout-tensor-parallel-size 1 --actor-offload parameters
--no-reshard-alias --reshard-transport cuda-ipc""".split()
"""Flags that are allowed only where no rank reads another's memory, as with one rank per node."""


@pytest.fixture
def code_of_rank_0(sums_data, tmp_path, monkeypatch):
    """code_of_rank_0(flags, nodes) -> exit code of rank 0 of two, None if the job may start."""
    for end in ("end_on_signals", "keep_checkout_off_path", "check_secret", "choose_interface"):
        monkeypatch.setattr(train, end, lambda: None)
    monkeypatch.setattr(train, "work", lambda *_: None)
    files = ["--model", str(sums_data / "model"), "--train-data", str(sums_data / "train.jsonl")]

    def code(flags: list[str], nodes: int) -> int | None:
        sizes = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2 // nodes, "GROUP_WORLD_SIZE": nodes, "RANK": 0}
        for name, value in sizes.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("MEGARL_DRIVER_PID", raising=False)
        monkeypatch.setattr(train.start_verdict, "allow", lambda: None)
        monkeypatch.setattr(train.start_verdict, "refuse", lambda _: None)
        return train.main(replace_flags([*COMMON, *files, "--save", str(tmp_path / "run")], flags))

    return code


def test_ranks_of_torchrun_count_and_not_those_of_the_flags(code_of_rank_0, capfd):
    """The flags say one rank, so that rules for several ranks of a node would pass here, and refuse the job
    in the driver."""
    assert code_of_rank_0([*SPLIT, "--nproc-per-node", "1", "--nnodes", "2"], nodes=1) == 2
    assert "--offload (parameters): an engine that is split" in capfd.readouterr().err
    assert code_of_rank_0([*SPLIT, "--nproc-per-node", "2"], nodes=2) is None
    assert code_of_rank_0([*SPLIT[:-1], "messages", "--nproc-per-node", "1"], nodes=1) is None

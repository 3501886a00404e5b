"""What the driver makes of a job that torchrun has started. `pytest tests/trainer/test_launch.py`"""

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.render import write_args
from megarl.rollout.replay_settings import replay_settings
from megarl.runtime.process import NUM_NODES
from megarl.trainer import launch, preflight

FLAGS = "--algorithm grpo --model m --train-data d --save s --train-iters 3"


@pytest.fixture
def started(monkeypatch):
    """started(flags, nodes, ranks) returns the given configuration and the one that the job gets."""

    def start(flags: str, nodes: int, ranks: int):
        given, got = load_config(f"{FLAGS} {flags}".split(), REGISTRY), []
        monkeypatch.setenv(NUM_NODES, str(nodes))
        monkeypatch.setenv("MEGARL_WORLD_SIZE", str(ranks))
        monkeypatch.setattr(preflight, "read_inputs", lambda *_: {})
        monkeypatch.setattr(launch, "run_driver", lambda body, *_: body(None) or 0)
        assert launch.drive(given, lambda _, config, *rest: got.append(config)) == 0
        return given, got[0]

    return start


@pytest.mark.parametrize(
    ("flags", "nodes", "ranks"),
    [
        ("", 1, 8),
        ("--nproc-per-node 2", 1, 8),
        ("", 2, 16),
        ("--nproc-per-node 16", 2, 16),
        ("--nnodes 8 --nproc-per-node 8", 6, 48),
        ("--num-actors 2 --actor-ranks 0 --actor-2-ranks 1", 2, 2),
    ],
)
def test_resolved_args_have_the_ranks_of_torchrun(flags, nodes, ranks, started, tmp_path):
    """The flags of the file count only where megarl starts the ranks itself."""
    given, config = started(flags, nodes, ranks)
    (tmp_path / "resolved.args").write_text(write_args(config))
    repeated = load_config([f"@{tmp_path / 'resolved.args'}"], REGISTRY).placement
    assert (repeated.nnodes, repeated.nproc_per_node, repeated.world_size) == (nodes, ranks // nodes, ranks)
    assert replay_settings(given, ranks) == replay_settings(config, ranks)  # with or without them


def test_nodes_with_different_numbers_of_ranks_are_in_no_flag(started):
    given, config = started("--nnodes 2 --nproc-per-node 4", 2, 7)
    assert config == given

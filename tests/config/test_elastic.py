"""--elastic-min-nodes: on how many nodes a job may run. `pytest tests/config/test_elastic.py`"""

import re

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.check import elastic_errors, fitting_nodes, on_nodes
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config

FLAGS = "--algorithm grpo --train-data d.jsonl --save r --executor ray --train-iters 3"


def job(data, flags: str):
    return load_config([*FLAGS.split(), "--model", str(data / "model"), *flags.split()], REGISTRY)


@pytest.mark.parametrize(
    "flags, counts",
    [
        ("--nnodes 4", [4]),
        ("--nnodes 4 --elastic-min-nodes 1", [4, 3, 2, 1]),
        ("--nnodes 4 --elastic-min-nodes 3", [4, 3]),
        # two ranks of one model on two nodes: an odd number of nodes leaves a rank over
        ("--nnodes 6 --elastic-min-nodes 2 --tensor-model-parallel-size 2", [6, 4, 2]),
        ("--nnodes 6 --elastic-min-nodes 2 --rollout-tensor-parallel-size 2", [6, 4, 2]),
        ("--nnodes 3 --elastic-min-nodes 1 --nproc-per-node 2 --tensor-model-parallel-size 2", [3, 2, 1]),
        # ranks by number: a smaller job lacks some
        ("--nnodes 2 --elastic-min-nodes 2 --actor-ranks 0 --rollout-ranks 1", [2]),
    ],
)
def test_the_numbers_of_nodes_that_the_layout_fits(sums_data, flags, counts):
    config = job(sums_data, flags)
    assert elastic_errors(config) == [] and fitting_nodes(config) == counts
    assert on_nodes(config, counts[-1]).placement.world_size == counts[-1] * config.placement.nproc_per_node
    assert on_nodes(config, counts[-1]).batch == config.batch


@pytest.mark.parametrize(
    "flags, error",
    [
        (
            "--nnodes 4 --elastic-min-nodes 1 --tensor-model-parallel-size 2",
            r"--elastic-min-nodes \(1\): the layout must fit that many nodes. Try 2. On 1: .*1",
        ),
        (
            "--nnodes 2 --elastic-min-nodes 1 --actor-ranks 0 --rollout-ranks 1",
            r"--elastic-min-nodes \(1\): the layout must fit that many nodes. Try 2. On 1: .*rollout-ranks",
        ),
    ],
)
def test_a_minimum_that_the_layout_does_not_fit_is_an_error(sums_data, flags, error):
    (found,) = elastic_errors(job(sums_data, flags))
    assert re.match(error, found), found


def test_a_minimum_that_means_nothing_is_an_error(sums_data):
    above = elastic_errors(job(sums_data, "--nnodes 2 --elastic-min-nodes 3"))
    assert above == ["--elastic-min-nodes (3): must be at most --nnodes (2). Try 2."]
    flags = FLAGS.replace("ray", "torchrun").split()
    flags += ["--model", str(sums_data / "model"), "--elastic-min-nodes", "1"]
    (found,) = elastic_errors(load_config(flags, REGISTRY))
    assert found.startswith(
        "--elastic-min-nodes (1): is for --executor ray. Under torchrun give its own --nnodes"
    )
    with pytest.raises(ConfigError, match=r"--elastic-min-nodes \(0\)"):
        job(sums_data, "--elastic-min-nodes 0")

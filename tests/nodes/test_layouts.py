"""Jobs across nodes train what one machine trains, whatever starts them and wherever the roles are, and move what
the plan of their weight sync says.

    pytest tests/nodes -m nightly

The nodes are namespaces of this machine, each with one rank."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import pytest

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.plan import make_plan
from megarl.reshard.vllm_atlas import vllm_atlases
from tests.e2e.jobs import Job, train
from tests.e2e.test_resume import check_equal
from tests.nodes import test_ray_nodes as ray
from tests.nodes import test_torchrun_nodes as torchrun
from tests.nodes.namespaces import Nodes, address

pytestmark = pytest.mark.timeout(600)
ALGORITHMS = {
    "grpo": (),
    "ppo": ("--algorithm", "ppo", "--kl-mode", "reward", "--kl-coef", "0.01", "--critic-lr", "1e-2"),
}
PLACEMENTS = {"colocated": (), "disjoint": ("--actor-ranks", "0", "--rollout-ranks", "1")}
ENGINES = {"in process": (), "out of process": ("--rollout-engine", "out-of-process")}


@pytest.fixture(scope="module")
def on_one_machine(sums_data, tmp_path_factory):
    """Return a function of flags that gives the job with them on this machine alone, run once."""
    jobs: dict[tuple[str, ...], Job] = {}

    def job(*flags: str) -> Job:
        if flags not in jobs:
            jobs[flags] = train(sums_data, tmp_path_factory.mktemp("alone") / "run", *flags)
            assert jobs[flags].returncode == 0, jobs[flags].output
        return jobs[flags]

    return job


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_nodes_train_as_one_machine_does(
    algorithm, placement, engine, launcher, on_one_machine, sums_data, shared
):
    """To the last bit: the ranks run the same sums in the same order, wherever they are."""
    flags = (*ALGORITHMS[algorithm], *PLACEMENTS[placement], *ENGINES[engine])
    with Nodes(2, shared) as nodes:
        if launcher == "ray":
            run = ray.start(nodes, sums_data, *flags)
            assert ray.exit_code(nodes, 300) == 0, nodes.log(0)
            log = nodes.log(0)
        else:
            run, processes = torchrun.start(nodes, sums_data, *flags)
            codes = [process.wait(300) for process in processes]
            log = torchrun.logs(nodes)
            assert codes == [0, 0], log
        there = Job(0, log, run)
        assert there.steps
        check_equal(on_one_machine(*flags), there, after=0)


def test_each_link_carries_what_the_plan_of_the_weight_sync_says(sums_data, shared):
    """The actor is split over two nodes, the engine is on a third: each of the two sends its part.

    Counted are the bytes of TCP that node 2 has received from each node between two steps. Beside the weights
    there are the commands, the tokens' columns that the engine's rank gets, and gloo's headers: below 5 % of the
    weights (the model has 1.6 MB, a step some 20 kB)."""
    flags = ("--actor-ranks", "0,1", "--actor-tensor-model-parallel-size", "2", "--rollout-ranks", "2")
    first, last = 2, 7
    with Nodes(3, shared) as nodes:
        run, processes = torchrun.start(nodes, sums_data, *flags, "--train-iters", "10")
        torchrun.wait_for_steps(run, first, nodes)
        before, at_first = received(nodes, 2), num_steps(run)
        torchrun.wait_for_steps(run, last, nodes)
        after, at_last = received(nodes, 2), num_steps(run)
        codes = [process.wait(300) for process in processes]
        assert codes == [0, 0, 0], torchrun.logs(nodes)
    shape = ModelShape.load(sums_data / "model")
    plan = make_plan(
        megatron_atlases(shape, MeshSpec(ranks=(0, 1), tp=2)), vllm_atlases(shape, (2,), 1), ranks_per_node=1
    )
    syncs = at_last - at_first
    for (source, destination), planned in plan.num_bytes(itemsize=4).items():
        assert destination == 2
        sent = after[address(source)] - before[address(source)]
        assert planned * syncs <= sent < 1.05 * planned * syncs, (source, sent, planned, syncs)


def received(nodes: Nodes, node: int) -> Counter[str]:
    """Return address of another node -> bytes that this one has received from it over the connections that are open."""
    ss = subprocess.run(
        ["ip", "netns", "exec", nodes.name(node), "ss", "-tinOH", "state", "established"],
        capture_output=True,
        text=True,
        check=True,
    )
    found: Counter[str] = Counter()
    for line in ss.stdout.splitlines():
        peer = line.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        number = re.search(r"bytes_received:(\d+)", line)
        found[peer] += int(number[1]) if number else 0
    return found


def num_steps(run) -> int:
    return (run / "metrics.jsonl").read_text().count("\n")

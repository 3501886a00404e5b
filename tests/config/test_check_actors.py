"""Rules about several actors in one job. `pytest tests/config/test_check_actors.py`"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.check import check_job
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.mesh import role_meshes, share_keys
from megarl.config.roles import DeviceMap

TWO = "--num-actors 2 --nproc-per-node 2"
APART = "--actor-ranks 0 --rollout-ranks 0 --actor-2-ranks 1 --rollout-2-ranks 1"


@pytest.fixture
def parsed(job):
    return lambda flags: load_config([job, *TWO.split(), *flags.split()], REGISTRY)


def findings(config) -> tuple[str, ...]:
    try:
        check_job(config, 2)
    except ConfigError as error:
        return error.errors
    return ()


@pytest.mark.parametrize(
    "flags",
    ["", APART, "--rollout-2-engine in-process", f"{APART} --actor-2-algorithm ppo --critic-2-ranks 0"],
)
def test_what_is_right(parsed, flags):
    assert findings(parsed(flags)) == ()


@pytest.mark.parametrize(
    "flags, finding",
    [
        (
            "--actor-ranks 0 --rollout-ranks 0",
            "--actor-ranks and --rollout-ranks and --actor-2-ranks and --rollout-2-ranks: leave rank 1 of 2 "
            "ranks without work. Try --nproc-per-node 1.",
        ),
        (
            "--rollout-engine in-process",
            "--rollout-engine (in-process): vLLM has room for one engine in a process. Leave it out, or try "
            "--rollout-2-engine out-of-process.",
        ),
        (
            "--actor-2-tensor-model-parallel-size 3",
            "actor_2: --actor-2-tensor-model-parallel-size (3): must divide the model's attention heads (4).",
        ),
        (
            "--tensor-model-parallel-size 3",
            "--tensor-model-parallel-size (3): must divide the model's attention heads (4).",
        ),
        (
            "--actor-2-ranks 2",
            "actor_2: --actor-2-ranks (2): must be below the number of ranks (2). Try 0-1.",
        ),
        (
            "--algorithm sft --actor-2-algorithm grpo",
            "--num-actors (2): each actor must learn from samples, and supervised fine-tuning does not.",
        ),
    ],
)
def test_every_rule(parsed, flags, finding):
    found = findings(parsed(flags))
    assert found and found[0].startswith(finding) and sum(line.startswith(finding) for line in found) == 1
    if flags.startswith("--tensor"):
        assert not [line for line in found if line.startswith("actor_2")], (
            "what is wrong with all is said once"
        )


def test_the_number_of_actors_is_that_of_the_configurations(parsed):
    assert (
        findings(replace(parsed(""), others=()))[0]
        == "--num-actors (2): must be the number of actors that are configured (1)."
    )


def test_roles_of_each_actor_have_its_number_and_shares_of_their_own(parsed):
    """In the order of set-up; on the same ranks the actors' columns stay apart."""
    meshes = role_meshes(parsed("--actor-2-algorithm ppo --actor-2-ranks 0-1 --critic-2-ranks 1"), 2)
    assert list(meshes) == ["actor", "rollout", "reward", "actor_2", "critic_2", "rollout_2", "reward_2"]
    assert share_keys(meshes) == {
        "actor": "actor",
        "rollout": "actor",
        "reward": "actor",
        "actor_2": "actor_2",
        "rollout_2": "actor_2",
        "reward_2": "actor_2",
        "critic_2": "critic_2",
    }


def test_a_device_map_places_them():
    assert DeviceMap(actor=[0], actor_2=[1, 2], reward_2=[[0], [1]]).flags() == [
        "--actor-ranks",
        "0",
        "--actor-2-ranks",
        "1,2",
        "--reward-2-ranks",
        "0",
        "1",
    ]
    with pytest.raises(TypeError, match=r"DeviceMap has no role \(actr\)"):
        DeviceMap(actr=[0])

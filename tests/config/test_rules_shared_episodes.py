"""--share-episodes: what the actors must have in common, what is refused, and that what a rule proposes is right.

pytest tests/config/test_rules_shared_episodes.py"""

from __future__ import annotations

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.check import check_job
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.roles import actors_of_episode

IS = "--num-actors 2 --nproc-per-node 2 --env env.py:Env --share-episodes"


@pytest.fixture
def errors(job, tmp_path, monkeypatch):
    """errors("--flag value") -> the errors of the job with these flags on top, and with env.py beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(
        "class Env:\n    def reset(self, row): ...\n    def step(self, text): ...\n"
    )
    (tmp_path / "other.py").write_text(
        "class Env:\n    def reset(self, row): ...\n    def step(self, text): ...\n"
    )

    def find(flags: str) -> list[str]:
        try:
            check_job(load_config([job, *flags.split()], REGISTRY), 2)
        except ConfigError as error:
            return [*error.errors]
        return []

    return find


RULES = {
    "one actor": (
        "--env env.py:Env --share-episodes",
        "--share-episodes: has no effect with one actor. Leave it out, or try --num-actors 2.",
        IS,
    ),
    "no environment": (
        "--num-actors 2 --nproc-per-node 2 --share-episodes",
        "--share-episodes (True): has no effect without --env. Leave it out.",
        IS,
    ),
    "an agent": (
        "--num-actors 2 --nproc-per-node 2 --share-episodes --agent-command true",
        "--share-episodes (True): has no effect without --env. Leave it out.",
        "--num-actors 2 --nproc-per-node 2 --agent-command true",
    ),
    "while the actors train": (
        f"{IS} --staleness 1",
        "--staleness (1): is not built for --share-episodes, whose episodes end before the actors train. Leave --staleness "
        "out.",
        IS,
    ),
    "single answers": (
        f"{IS} --turn-rewards",
        "--turn-rewards: --share-episodes has one reward per actor and episode. Leave one of them out.",
        IS,
    ),
    "rows by one actor's rewards": (
        f"{IS} --curriculum easy-first",
        "--curriculum, --difficulty-min and --difficulty-max: choose rows by the rewards of one actor, and with "
        "--share-episodes all actors have the same rows. Leave them out.",
        IS,
    ),
    "refilled steps": (
        f"{IS} --dynamic-sampling",
        "--num-actors (2): --dynamic-sampling is not built for several actors. Leave --dynamic-sampling out.",
        IS,
    ),
    "an engine in the workers": (
        f"{IS} --rollout-2-engine in-process",
        "--rollout-2-engine (in-process): with --share-episodes every engine has a process of its own, so that one "
        "samples while another waits for its turn. Leave it out, or try --rollout-2-engine out-of-process.",
        f"{IS} --rollout-2-engine out-of-process",
    ),
    "engines elsewhere": (
        f"{IS} --rollout-ranks 0 --rollout-2-ranks 1",
        "--rollout-2-ranks (1): with --share-episodes a rank steps an engine of each actor, so the engines of all actors "
        "are on the same ranks. Try 0.",
        f"{IS} --rollout-ranks 0 --rollout-2-ranks 0",
    ),
    "fewer engines": (
        f"{IS} --rollout-2-tensor-parallel-size 2",
        "--rollout-2-tensor-parallel-size (2): with --share-episodes all actors have as many engines. Try 1.",
        f"{IS} --rollout-2-tensor-parallel-size 1",
    ),
    "another order of rows": (
        f"{IS} --actor-2-seed 3",
        "--actor-2-seed (3): with --share-episodes all actors play in the same episodes, and the first actor has 0. Leave "
        "it out.",
        IS,
    ),
    "larger groups": (
        f"{IS} --actor-2-num-samples-per-prompt 16",
        "--actor-2-num-samples-per-prompt (16): with --share-episodes all actors play in the same episodes, and the "
        "first actor has 8. Leave it out.",
        f"{IS} --actor-2-global-batch-size 32",
    ),
    "another environment": (
        f"{IS} --actor-2-env other.py:Env",
        "--actor-2-env (other.py:Env): with --share-episodes all actors play in the same episodes, and the first actor has "
        "env.py:Env. Leave it out.",
        IS,
    ),
    "a greedy episode more": (
        f"{IS} --actor-2-algorithm remax",
        "--share-episodes: one of grpo and remax samples a greedy episode more of each prompt, and all actors play in the "
        "same ones. Give both the same --algorithm, or try ppo.",
        f"{IS} --algorithm remax",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_said_once_and_its_advice_works(errors, name):
    flags, finding, instead = RULES[name]
    found = errors(flags)
    assert [one.removeprefix("actor_2: ") for one in found].count(finding) == 1, found
    assert errors(instead) == []


@pytest.mark.parametrize(
    "flags",
    [
        "--algorithm ppo",
        "--algorithm ppo --actor-2-algorithm grpo --actor-2-lr 0 --actor-2-temperature 0.7 --actor-2-max-turns 2",
        "--algorithm ppo --critic-2-lr 1e-4 --actor-2-max-response-length 4 --actor-ranks 0 --critic-2-ranks 1",
    ],
)
def test_what_is_right(errors, flags):
    assert errors(f"{IS} {flags}") == []


def test_the_actors_of_an_episode_are_all_of_the_job_or_one(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = load_config([job, *IS.replace("actors 2", "actors 3").split()], REGISTRY)
    assert actors_of_episode(shared) == ["actor", "actor_2", "actor_3"]
    assert [actors_of_episode(one) for one in shared.others] == [actors_of_episode(shared)] * 2
    apart = load_config([job, *IS.removesuffix("--share-episodes").split()], REGISTRY)
    assert [actors_of_episode(one) for one in (apart, *apart.others)] == [["actor"]] * 2

"""The training loop runs on an executor that megarl does not know, with roles that have no model.
`pytest tests/runtime/test_thread_training.py`"""

import contextlib
import dataclasses
import json

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.errors import ConfigError
from megarl.config.run_sections import EXECUTORS
from megarl.config.loader import load_config
from megarl.trainer import executors
from megarl.trainer.__main__ import train_job
from megarl.trainer.executors import has_rank_processes, interfaces_of, open_executor, register_executor
from megarl.trainer.preflight import read_inputs
from megarl.runtime.executor import RemoteError
from tests.runtime.stand_ins import RankState, Trained, build_stand_ins
from tests.runtime.thread_executor import ThreadExecutor

STEPS, PROMPTS, GROUP = 3, 4, 2


@pytest.fixture
def job(sums_data, tmp_path, monkeypatch):
    """Configuration of a PPO job on three threads, and the state of each rank."""
    monkeypatch.setattr(executors, "_FACTORIES", dict(executors._FACTORIES))
    states: dict[int, RankState] = {}

    @contextlib.contextmanager
    def threads(config, world_size):
        build, ranks = build_stand_ins(config, world_size, states)
        executor = ThreadExecutor(build, ranks, world_size, interfaces_of(ranks))
        yield executor
        executor.shutdown()

    register_executor("threads", threads)
    flags = (
        f"--executor threads --algorithm ppo --model {sums_data}/model --train-data {sums_data}/train.jsonl --save {tmp_path}/run "
        f"--nproc-per-node 3 --actor-ranks 0-1 --critic-ranks 2 --rollout-ranks 0-1 --train-iters {STEPS} "
        f"--num-prompts {PROMPTS} --num-samples-per-prompt {GROUP} --global-batch-size 4 "
        "--max-prompt-length 32 --max-response-length 16"
    )
    config = load_config(flags.split(), REGISTRY)
    run = dataclasses.replace(config.run, log_with=())
    yield dataclasses.replace(config, run=run), states
    EXECUTORS.remove("threads")


def train(config) -> None:
    with open_executor(config, 3) as executor:
        train_job(executor, config, read_inputs(config, 3), 3)


def test_the_loop_trains_every_sample_once_on_threads(job, tmp_path):
    config, states = job
    assert not has_rank_processes(config)
    train(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["reward/mean"] == 0.5 and row["sync/version"] == row["step"] for row in rows)
    for rank, role in ((0, "actor"), (2, "critic")):
        trained = states[rank].updates[role]
        assert len(trained) == len(set(trained)) == STEPS * PROMPTS * GROUP


def test_a_failure_on_a_thread_names_role_rank_and_step(job, monkeypatch):
    def broken(self, kl_coef: float = 0.0):
        raise ValueError("learning rate (-1) must be positive")

    monkeypatch.setattr(Trained, "update", broken)
    with pytest.raises(
        RemoteError, match=r"^\[(actor|critic) rank \d\] update failed at step 1: ValueError: le"
    ):
        train(job[0])


def test_an_executor_that_nobody_has_registered_is_an_error(job):
    told = r"--executor \(thread\): must be one of torchrun, ray, inline, threads. Did you mean threads\?"
    with pytest.raises(ConfigError, match=told):
        load_config(["--executor", "thread"], REGISTRY)

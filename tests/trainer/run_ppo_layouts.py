"""Two PPO steps in several placements: the real roles, step host and scheduler, on rollouts that are fixed.

    run_ppo_layouts.py FOLDER RANK DATA

Every rank runs the driver's part too, on an executor that shares each call's answers with all ranks. What
came out of each placement goes to FOLDER/<placement>/{metrics.json, actor/, critic/}."""

from __future__ import annotations

import json
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.algorithms import REGISTRY
from megarl.algorithms.flows import flow_of_actors
from megarl.config.check import check_job
from megarl.config.loader import load_config
from megarl.config.mesh import hosting_ranks, role_meshes
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.trainer.gate import LogProbGate
from megarl.trainer.preflight import Inputs
from megarl.trainer.state import TrainState
from megarl.trainer.step_runner import StepRunner
from megarl.trainer.stop_request import StopRequest
from megarl.flow import Flow, symbolic_roles
from megarl.packing import Sample
from megarl.role_names import kind_and_suffix, with_suffix
from megarl.workers.store import RolloutSample, RolloutBlock
from megarl.workers.worker import build_roles

WORLD_SIZE, STEPS, NUM_PROMPTS, SAMPLES_PER_PROMPT = 4, 2, 4, 3
SAMPLES_PER_STEP = NUM_PROMPTS * SAMPLES_PER_PROMPT
PLACEMENTS = {
    "one": "--actor-ranks 0 --critic-ranks 0 --rollout-ranks 0-3",
    "colocated_tp2": "--actor-ranks 0-1 --critic-ranks 0-1 --rollout-ranks 0-3 "
    "--tensor-model-parallel-size 2",
    "disjoint_2_1_1": "--actor-ranks 0-1 --critic-ranks 2 --reference-ranks 3 --rollout-ranks 0-1 "
    "--actor-tensor-model-parallel-size 2 "
    "--reference-tensor-model-parallel-size 1",
    "tp2_beside_dp2": "--actor-ranks 0-1 --critic-ranks 0-1 --rollout-ranks 2-3 "
    "--actor-tensor-model-parallel-size 2 --actor-sequence-parallel",
    "tp2_cp2_and_cp2": "--actor-ranks 0-3 --critic-ranks 1-2 --rollout-ranks 2-3 "
    "--actor-tensor-model-parallel-size 2 --actor-sequence-parallel "
    "--context-parallel-size 2",
    "pp2_and_dp3": "--actor-ranks 0-1 --critic-ranks 1-3 --rollout-ranks 3 "
    "--actor-pipeline-model-parallel-size 2",
}
OF_THE_SECOND = "--seed 5 --actor-adam-beta1 0.5 --gae-lambda 0.9"
ALONE = {
    "second_tp2": "--actor-ranks 0-1 --critic-ranks 2 --rollout-ranks 2-3 "
    f"--actor-tensor-model-parallel-size 2 {OF_THE_SECOND}"
}
_SECOND = (
    "--actor-2-tensor-model-parallel-size 2 --actor-2-seed 5 --actor-2-adam-beta1 0.5 "
    "--actor-2-gae-lambda 0.9"
)
TWO_ACTORS = {
    "disjoint": "--num-actors 2 --actor-ranks 0 --critic-ranks 0 --rollout-ranks 0 --actor-2-ranks "
    "1-2 --critic-2-ranks 3 --rollout-2-ranks 3 "
    f"{_SECOND}",
    "colocated": "--num-actors 2 --actor-ranks 0 --critic-ranks 0 --rollout-ranks 0-3 "
    "--actor-2-ranks 0-1 --critic-2-ranks 0 --rollout-2-ranks 0 "
    f"{_SECOND}",
}
"""The first is that of "one", the second that of "second_tp2"."""
WARM_UP = {"warm_up": "--actor-ranks 0 --critic-ranks 0 --rollout-ranks 0-3 --critic-warmup-iters 1"}
FLAGS = f"""--algorithm ppo --train-iters {STEPS} --num-prompts {NUM_PROMPTS} --num-samples-per-prompt {SAMPLES_PER_PROMPT} --global-batch-size 6
    --num-epochs 2 --actor-lr 1e-4 --critic-lr 3e-4 --kl-mode reward --kl-coef 0.05 --kl-controller adaptive --kl-target 0.001 --kl-horizon 100
    --max-prompt-length 16 --max-response-length 16 --max-tokens-per-micro-batch 48 --gate-max-abs inf --gate-mean-abs inf
    --reward-function {__file__}:unused"""


class FixedRollout:
    """An engine whose responses depend on nothing but the sample."""

    def __init__(self, mesh, store, seed, suffix) -> None:
        self.mesh, self.store, self.seed, self.suffix, self.rank = mesh, store, seed, suffix, dist.get_rank()

    def setup(self) -> None:
        pass

    def generate(self, purpose: str, visits: dict[int, int]) -> list[Sample]:
        replica, dp = self.mesh.coordinates(self.rank)["dp"], self.mesh.dp
        made = []
        group = range(SAMPLES_PER_PROMPT)
        samples = [(visit * SAMPLES_PER_PROMPT + index, visit) for visit in visits for index in group]
        for sample_id, visit in samples[replica::dp]:
            rng = random.Random(f"{self.seed or ''}/{sample_id}")
            prompt = [rng.randrange(5, 200) for _ in range(rng.randint(2, 9))]
            response = [rng.randrange(5, 200) for _ in range(rng.randint(1, 14))]
            log_probs = [-5.0 - rng.random() for _ in response]
            made.append(RolloutSample(sample_id, 0, visit, [0] * len(response), prompt, response, log_probs))
        rollouts = self.store.source(purpose + self.suffix)
        rollouts.release()
        rollouts.add(RolloutBlock(made))
        return [rollout.record((self.rank,)) for rollout in made]

    def sync(self, version: int) -> dict[str, float]:
        return {}


class FixedReward:
    """One sample of each step has no reward: that must not depend on the placement either."""

    def __init__(self, store, suffix) -> None:
        self.store, self.suffix = store, suffix

    def setup(self) -> None:
        pass

    def score(self, purpose: str, sample_ids: list[int]) -> list[dict]:
        samples = self.store.source(purpose + self.suffix)
        rewards = [None if s % SAMPLES_PER_STEP == 4 else random.Random(s).random() for s in samples]
        return [{"sample_id": s, "reward": reward} for s, reward in zip(samples, rewards, strict=True)]


class EveryRankExecutor:
    """Each rank makes every call in the same order, and runs those that are for it."""

    def __init__(self, roles: dict[str, object], ranks: dict[str, list[int]]) -> None:
        self.roles, self.ranks, self.label = roles, ranks, None

    def call(self, role: str, method: str, /, *args, **kwargs):
        return self.call_on(self.ranks[role], role, method, *args, **kwargs)

    def call_on(self, ranks, role: str, method: str, /, *args, **kwargs):
        value = getattr(self.roles[role], method)(*args, **kwargs) if dist.get_rank() in ranks else None
        everyone: list = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, value)
        return Done([everyone[rank] for rank in ranks])

    def wait_any(self, futures):
        return list(futures)

    def take_seconds(self) -> dict:
        return {}


class Done:
    seconds = ended = 0.0

    def __init__(self, values: list) -> None:
        self.values = values

    def result(self) -> list:
        return self.values

    def first(self):
        return self.values[0]

    def done(self) -> bool:
        return True


STUDENT = {
    "student": "--num-actors 2 --actor-ranks 0 --critic-ranks 0 --rollout-ranks 0-3 --actor-2-ranks "
    "1 --critic-2-ranks 1"
}
"""A flow of one's own: the second actor learns from the first's samples and advantages."""
ALL = PLACEMENTS | ALONE | TWO_ACTORS | STUDENT | WARM_UP


def flow_with_student(config: TrainConfig) -> Flow:
    actor, student, critic, reference, reward = symbolic_roles("actor actor_2 critic reference reward")
    return (
        actor.rollout()
        .join(reward.score, actor.log_probs, student.log_probs, reference.log_probs, critic.values)
        .advantages(config.algorithm)
        .update(critic)
        .update(actor)
        .update(student)
    )


def run(placement: str, folder: Path, data: Path) -> None:
    flags = [
        *FLAGS.split(),
        "--reward-max-failed-share",
        "0.2",
        *ALL[placement].split(),
        "--model",
        str(data / "model"),
        "--train-data",
        str(data / "train.jsonl"),
        "--save",
        str(folder / placement / "run"),
        "--nproc-per-node",
        str(WORLD_SIZE),
    ]
    config = load_config(flags, REGISTRY)
    shape = check_job(config, WORLD_SIZE)
    roles = build_roles(config, WORLD_SIZE)
    store = roles["data"].store
    for suffix, of_actor in configs_of_actors(config).items():
        if (rollout := f"rollout{suffix}") in roles:
            roles |= {
                rollout: FixedRollout(roles[rollout].mesh, store, of_actor.batch.seed, suffix),
                f"reward{suffix}": FixedReward(store, suffix),
            }
        if (actor := f"actor{suffix}") in roles:
            roles[actor].rollout_mesh = None  # no engine wants weights
    executor, meshes = (
        EveryRankExecutor(roles, hosting_ranks(config, WORLD_SIZE)),
        role_meshes(config, WORLD_SIZE),
    )
    inputs = Inputs(shape, range(NUM_PROMPTS - 1), None)  # fewer rows than a step takes: one comes twice
    state = TrainState(config, dict.fromkeys(configs_of_actors(config), inputs))
    runner = StepRunner(executor, meshes, state, LogProbGate(executor, state), StopRequest())
    for role in meshes:
        executor.call(role, "setup")
    flow = flow_with_student(config) if placement in STUDENT else flow_of_actors(config, meshes)
    sampling = [
        suffix for suffix in state.actors if any(node.role == f"rollout{suffix}" for node in flow.nodes)
    ]
    steps = []
    for _ in range(STEPS):
        state.begin_step()
        runner.sample(flow, dict.fromkeys(sampling))
        of_actors = runner.metrics(runner.finish())
        runner.judge(of_actors)
        state.complete_step()
        steps.append({with_suffix(k, s): value for s, own in of_actors.items() for k, value in own.items()})
    for role in [role for role in meshes if kind_and_suffix(role)[0] in ("actor", "critic")]:
        executor.call(role, "export_hf", str(folder / placement / role))
    if dist.get_rank() == 0:
        (folder / placement / "metrics.json").write_text(json.dumps(steps))


def main() -> None:
    folder, rank, data = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    for placement in ALL:
        run(placement, folder, data)
    dist.barrier()
    dist.destroy_process_group()


def unused(data_source, solution_str, ground_truth, extra_info) -> float:
    raise NotImplementedError


if __name__ == "__main__":
    main()

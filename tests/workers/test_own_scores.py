"""Every way of scoring gives each sample the score of its own text and row, in whatever order samples come.

Neighbours of a group have different texts, and scores that tell which text and which row was judged: 100 x the row +
the number in the response. Mutations that made these fail: the texts, verdicts or scores of a group's samples
exchanged in `RewardRole.score`, `_of_rule`, `_begin` and `_texts`, in `BackgroundPool` and `RewardPool`, in the three
backends of `RewardModelRole`, in `EarlyScores` (see test_early_scores.py) and in `take_scores`.

pytest tests/workers/test_own_scores.py"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megarl.batch import Batch
from megarl.config.mesh import MeshSpec
from megarl.config.schema import EpisodeConfig, StreamingConfig
from megarl.data.prompts import Prompt
from megarl.episodes.episode import EpisodeResult
from megarl.invariants import InvariantError, digest
from megarl.packing import MiniBatch, Sample
from megarl.rewards import classifier
from megarl.rewards.background import BackgroundPool
from megarl.rewards.judge_prompt import JudgePrompt
from megarl.rollout.judge import Answer
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.trainer.scores import take_scores
from megarl.workers.offload_manager import OffloadManager
from megarl.workers.reward import RewardRole
from megarl.workers.reward_model import RewardModelRole
from megarl.workers.store import BatchShard, RolloutBlock, RolloutSample, SampleStore
from tests.workers.reward_jobs import config

REWARD = """
def reward(data_source, solution_str, ground_truth, extra_info):
    return 100.0 * float(ground_truth) + float(solution_str.split()[-1])
"""
ROW_OF = {11: 1, 5: 2, 8: 1, 2: 2, 9: 1, 3: 2}
"""Sample -> row, which is its group: three samples each, in the order in which the engine has made them."""
OWN = {sample: 100.0 * row + 10.0 + sample for sample, row in ROW_OF.items()}
ORDERS = [[*ROW_OF], [*reversed(ROW_OF)], sorted(ROW_OF)]
DATASET = [Prompt(row, "x", ({"role": "user", "content": f"question {row}"},), str(row)) for row in range(3)]
WORDS = SimpleNamespace(decode_batch=lambda ids: [f"it is {one[-1]}" for one in ids])
"""A tokenizer whose token i is the number i."""


def rollouts(answers: bool = False, reward: bool = False) -> list[RolloutSample]:
    """The samples as an engine makes them. answers: as episodes; reward: that bring their rewards."""
    made = []
    for sample, row in ROW_OF.items():
        response, episode = [7, 10 + sample], None
        if answers:
            given = OWN[sample] if reward else 0.0
            said = [f"at first {sample}", f"it is {10 + sample}"]
            episode = EpisodeResult(given, 2, "stop", None, None, [], [], said, [], [], [])
        one = RolloutSample(sample, row, row, [0, 0], [row], response, [0.0, 0.0], episode=episode)
        one.digest = digest(one.prompt, one.response)
        made.append(one)
    return made


def rule(folder, episodes: EpisodeConfig | None = None, staleness: int = 0) -> RewardRole:
    (folder / "reward.py").write_text(REWARD)
    job = config(folder, "none")
    function = None if episodes and episodes.env else f"{folder}/reward.py:reward"
    job = replace(
        job,
        data=replace(job.data, reward_function=function, reward_num_workers=0),
        streaming=StreamingConfig(staleness=staleness),
        episodes=episodes or EpisodeConfig(),
    )
    role = RewardRole("reward", job, {"reward": MeshSpec((0,))}, SampleStore(), OffloadManager())
    role.rollout = SimpleNamespace(tokenizer=WORDS, datasets={"train": DATASET, "eval": DATASET})
    role.setup()
    return role


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("kind", ["rule", "evaluation", "early", "environment", "agent", "early agent"])
def test_a_rule_an_environment_or_an_agent_gives_each_sample_its_own_reward(tmp_path, kind, order):
    agent = EpisodeConfig(agent_command="./agent")
    episodes = {"environment": EpisodeConfig(env=("env.py:Env",)), "agent": agent, "early agent": agent}.get(
        kind
    )
    role = rule(tmp_path, episodes)
    made = rollouts(episodes is not None, reward=kind == "environment")
    source = "eval" if kind == "evaluation" else "train"
    role.store.source(source).add(RolloutBlock(made))
    if kind.startswith("early"):
        role.pool = BackgroundPool(role.config.data, 0)  # its thread, and no process
        role._begin(made[3:])
        role._begin(made[:2])
    records = role.score(source, order, num_logged=-1)
    role.shut_down()
    assert [record["sample_id"] for record in records] == order
    assert {record["sample_id"]: record["reward"] for record in records} == OWN
    assert all(
        record["digest"] == digest([ROW_OF[s := record["sample_id"]]], [7, 10 + s]) for record in records
    )
    assert all(f"it is {10 + record['sample_id']}" in record["response"] for record in records)


def model(folder, monkeypatch, backend: str, order: list[int]) -> RewardModelRole:
    """A reward model of which only the model is missing: it reads 100 x the question + the answer."""

    def ids(hugging_face, messages, text) -> list[int]:
        return [int(part.rpartition(" ")[2]) for part in (messages[0]["content"], text)]

    def score(sequence) -> float:
        return 100.0 * sequence[-2] + sequence[-1]

    def of_micro_batch(micro) -> torch.Tensor:
        return torch.tensor([score(one) for one in micro.batch.tokens.view(-1, 2).tolist()])

    def answer(question: str, key: int) -> Answer:
        numbers = [int(number) for number in re.findall(r"\d+", question)]
        return Answer(f"{score(numbers[:2]):g}", True)

    monkeypatch.setattr(classifier, "encode_pair", ids)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *args, **kwargs: None)
    store, used = SampleStore(), SimpleNamespace(use=lambda *parts: None)
    batch = Batch.from_samples(order, [[ROW_OF[s]] for s in order], [[7, 10 + s] for s in order])
    halves = [
        MiniBatch((((order[4], order[1]),),), 2, 2),
        MiniBatch((((order[0],), (*order[2:4], order[5])),), 4, 4),
    ]
    store.set_batch("reward_model", BatchShard(batch, halves))
    role = RewardModelRole(
        "reward_model", config(folder, backend), {"reward_model": MeshSpec((0,))}, store, OffloadManager()
    )
    role.actor_tokenizer, role.dataset, role.is_pair, role.hugging_face = WORDS, DATASET, True, None
    role.memory, role.max_length = used, 9
    role.classifier = SimpleNamespace(scores=lambda many, limit: [score(one) for one in many], max_length=9)
    role.value_model = SimpleNamespace(
        scores=lambda micros: [of_micro_batch(micro) for micro in micros],
        reports=True,
        device="cpu",
        groups=SimpleNamespace(dp=None),
    )
    role.prompt = JudgePrompt("{prompt} has {response}", re.compile(r"^(\d+)$"), 0.0, 1000.0)
    role.judge = SimpleNamespace(answers=lambda questions, keys: map(answer, questions, keys))
    return role


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("backend", ["transformers", "megatron", "judge"])
@pytest.mark.parametrize("method", ["score", "score_groups"])
def test_a_reward_model_gives_each_sample_its_own_score(tmp_path, monkeypatch, backend, method, order):
    role = model(tmp_path, monkeypatch, backend, order)
    shown = [*ROW_OF]
    random.Random(str(order)).shuffle(shown)
    records = getattr(role, method)({sample: ROW_OF[sample] for sample in shown})
    factor = 1 / 1000 if backend == "judge" else 1.0
    assert {record["sample_id"]: record["score"] for record in records} == pytest.approx(
        {sample: score * factor for sample, score in OWN.items()}
    )
    assert len(records) == len(OWN)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_driver_gives_each_sample_the_sum_of_its_own_scores(order):
    """Whatever order the ranks report in; a score of another text is an error."""
    batch, weights = RolloutBatch(1, {}), {"reward": 1.0, "reward_model": 0.5}
    batch.samples = [Sample(sample, 3, 2, group=row, digest=sample) for sample, row in ROW_OF.items()]
    ranks = [order[:2], order[2:]]
    for role, field in (("reward", "reward"), ("reward_model", "score")):
        take_scores(
            batch,
            role,
            [[{"sample_id": s, field: OWN[s], "digest": s} for s in rank] for rank in ranks],
            weights,
        )
    assert batch.rewards == {sample: 1.5 * score for sample, score in OWN.items()}
    assert [*batch.rewards] == [*ROW_OF]
    mixed = [{"sample_id": s, "reward": OWN[s], "digest": {11: 8, 8: 11}.get(s, s)} for s in order]
    with pytest.raises(InvariantError, match="has judged another response"):
        take_scores(batch, "reward", [mixed], weights)

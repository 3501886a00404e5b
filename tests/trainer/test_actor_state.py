"""What the driver keeps per actor: which rows, whose model's size, which roles an exchange knows. `pytest
tests/trainer/test_actor_state.py`"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.algorithms import REGISTRY
from megarl.algorithms.kl_controller import MEASURED_KL
from megarl.algorithms.lagrange import MEAN_COST
from megarl.algorithms.turn_rewards import TurnRewards
from megarl.config.hf_config import ModelShape
from megarl.config.schema import (
    BatchConfig,
    DataConfig,
    EpisodeConfig,
    ModelConfig,
    RewardModelConfig,
    RunConfig,
    TrainConfig,
)
from megarl.packing import Sample
from megarl.trainer.actor_state import ActorState
from megarl.trainer.preflight import Inputs
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.trainer.state import TrainState
from megarl.trainer.trainer import Trainer
from megarl.workers.advantage_inputs import given_scores, given_turns
from megarl.flow import symbolic_roles

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 283,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "eos_token_id": 1,
}


def model(folder: Path, name: str, **config) -> str:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(config))
    return str(folder / name)


def config(folder: Path) -> TrainConfig:
    return TrainConfig(
        algorithm=REGISTRY["ppo"](),
        model=ModelConfig(model=model(folder, "actor", **QWEN3, hidden_size=128)),
        batch=BatchConfig(train_iters=1, num_prompts=2, num_samples_per_prompt=2, global_batch_size=4),
        data=DataConfig(train_data=("rows",)),
        run=RunConfig(save="unused"),
    )


def actor(config: TrainConfig, suffix: str = "") -> ActorState:
    return ActorState(suffix, config, Inputs(ModelShape.load(config.model.model), range(10), None))


def test_the_cost_of_a_sample_is_that_of_the_roles_own_model(tmp_path):
    one = config(tmp_path)
    assert [actor(one).hidden_size(role) for role in ("actor", "reference", "critic")] == [128, 128, 128]
    bert = model(
        tmp_path,
        "bert",
        model_type="bert",
        architectures=["BertForSequenceClassification"],
        hidden_size=32,
        id2label={"0": "x"},
    )
    odd = model(
        tmp_path,
        "odd",
        model_type="gpt2",
        architectures=["GPT2ForSequenceClassification"],
        n_embd=48,
        id2label={"0": "x"},
    )
    larger = model(tmp_path, "critic", **QWEN3, hidden_size=192)
    other = replace(
        one,
        model=replace(one.model, critic_model=larger),
        reward_models=RewardModelConfig(reward_model=(bert, odd), reward_model_backend=("transformers",)),
    )
    roles = ("actor", "critic", "reward_model", "reward_model_2")
    assert [actor(other).hidden_size(role) for role in roles] == [128, 192, 32, 128]
    assert actor(other, "_2").hidden_size("critic_2") == 192


@pytest.fixture
def trainer(tmp_path):
    """A trainer without ranks: two actors and what decides on their rows."""
    one = config(tmp_path)
    trainer = object.__new__(Trainer)
    trainer.state = object.__new__(TrainState)
    trainer.state.actors = {"": actor(one), "_2": actor(replace(one, batch=replace(one.batch, seed=1)), "_2")}
    trainer.runner = SimpleNamespace(shard_key_of={"actor": "actor", "critic": "actor"})
    return trainer


def admitted(trainer, flow, rows) -> dict[str, dict[int, int]]:
    """Suffix of each actor -> visit -> row, of the prompts that a step samples."""
    chosen = trainer.state.rows_of_actors(flow, rows)
    for suffix, of_actor in chosen.items():
        trainer.state.actors[suffix].admit(of_actor, step=1)
    return {suffix: trainer.state.actors[suffix].buffer.issue() for suffix in chosen}


def test_every_actor_that_samples_has_rows_of_its_own(trainer):
    first, second = symbolic_roles("actor actor_2")
    flow = first.rollout().beside(second.rollout())
    visits = admitted(trainer, flow, None)
    assert visits.keys() == {"", "_2"} and visits[""] != visits["_2"]
    assert [*visits[""]] == [*visits["_2"]] == [0, 1]  # each actor counts its own
    assert admitted(trainer, flow, [3, 3]) == {"": {2: 3, 3: 3}, "_2": {2: 3, 3: 3}}
    chosen = {"actor": [3, 4], "actor_2": [5, 6]}
    assert admitted(trainer, flow, chosen) == {"": {4: 3, 5: 4}, "_2": {4: 5, 5: 6}}
    before = trainer.state.actors["_2"].snapshot()
    assert admitted(trainer, first.rollout(), None).keys() == {""}
    assert trainer.state.actors["_2"].snapshot() == before
    with pytest.raises(ValueError, match=r"actor \(actor_3\) must be one of actor, actor_2\."):
        admitted(trainer, flow, {"actor_3": [1, 2]})
    with pytest.raises(ValueError, match=r"rows \(12\) must be rows of --train-data: 0 to 9\."):
        admitted(trainer, flow, {"actor_2": [1, 12]})
    with pytest.raises(ValueError, match="rows: actor_2 samples nothing in this flow. Leave its rows out."):
        admitted(trainer, first.rollout(), chosen)


@pytest.mark.parametrize("name, flags", [("online-dpo", {}), ("grpo", {"policy_loss": "reinforce"})])
def test_a_loss_of_one_update_takes_no_rows_for_two(tmp_path, name, flags):
    one = actor(replace(config(tmp_path), algorithm=REGISTRY[name](**flags)))
    with pytest.raises(ValueError, match=r"rows \(4 of them\).*one update per step, of 2 rows.*Try 2 rows\."):
        one.admit([1, 2, 3, 4], step=1)
    one.admit([1, 2], step=1)
    for several in ({"policy_loss": "reinforce", "tis_clip": 2.0}, {}):
        actor(replace(config(tmp_path), algorithm=REGISTRY["grpo"](**several))).admit([1, 2, 3, 4], step=1)


def test_steps_of_the_critic_alone_move_neither_the_kl_nor_the_multiplier(tmp_path):
    flags = {"kl_mode": "reward", "kl_coef": 0.02, "kl_controller": "adaptive", "kl_horizon": 100}
    for name, more in (("ppo", {}), ("ppo-lagrangian", {"cost_score": "harm", "cost_limit": 0.9})):
        algorithm = REGISTRY[name](critic_warmup_iters=3, **flags, **more)
        one = actor(replace(config(tmp_path), algorithm=algorithm))
        found = []
        for step in range(1, 6):
            batch = RolloutBatch(step, {0: 0})
            batch.samples.append(Sample(0, 10, 5, group=0))
            batch.rewards[0] = 1.0
            one.update_kl({MEASURED_KL: 0.0, MEAN_COST: 1.3}, batch)
            found.append((one.kl.coef, one.multiplier and one.multiplier.value))
        assert found[0] == found[1] == found[2] == (0.02, 1.0 if more else None)
        assert 0.02 > found[3][0] > found[4][0]
        assert not more or 1 < found[3][1] < found[4][1]


def test_actors_that_play_in_the_same_episodes_have_the_same_rows(tmp_path, trainer):
    one = replace(config(tmp_path), episodes=EpisodeConfig(env=("env.py:Env",), share_episodes=True))
    trainer.state.actors = {"": actor(one), "_2": actor(one, "_2")}
    first, second = symbolic_roles("actor actor_2")
    flow = first.rollout().beside(second.rollout())
    visits = admitted(trainer, flow, None)
    assert visits[""] == visits["_2"]
    trainer.admit([7, 8], "actor_2")
    assert [one.given_rows for one in trainer.state.actors.values()] == [[7, 8], [7, 8]]
    same = {"actor": [3, 4], "actor_2": [3, 4]}
    assert admitted(trainer, flow, same) == {"": {2: 3, 3: 4}, "_2": {2: 3, 3: 4}}
    for rows in ({"actor": [3, 4], "actor_2": [4, 3]}, {"actor_2": [3, 4]}):
        with pytest.raises(
            ValueError, match="all actors play in the episodes of the same rows. Give one list."
        ):
            trainer.state.rows_of_actors(flow, rows)


def test_an_exchange_names_the_roles_that_there_are(trainer):
    with pytest.raises(ValueError, match=r"role \(critik\) must be one of those of the job: actor, critic\."):
        trainer.exchange(["values"], "critik", "actor")


def test_a_warning_names_every_model_whose_updates_are_left_out(tmp_path):
    """That of the critic of costs too, which has the critic's mini-batches."""
    one, skipped = (
        actor(config(tmp_path), "_2"),
        {"policy/updates_unscored": 2.0, "critic/updates_unscored": 2.0},
    )
    said = (
        "step 3: updates left out, as no sample of their mini-batch is learnt from (rewards failed, or the "
        "algorithm leaves them out): "
    )
    assert one.note_unscored_updates({"policy/loss": 0.5}, 3) == ""
    assert one.note_unscored_updates(skipped, 3) == f"{said}2 of actor_2 and 2 of critic_2."
    skipped["cost_critic/updates_unscored"] = 1.0
    assert one.note_unscored_updates(skipped, 3).endswith("2 of critic_2 and 1 of cost_critic_2.")


def test_a_jump_of_the_critic_of_costs_is_seen_as_one_of_the_critic_is(tmp_path):
    one = config(tmp_path)
    one = replace(one, critic_optimizer=replace(one.optimizer, clip_grad=2.0))
    for kind in ("critic", "cost_critic"):
        watch = actor(one).jumps
        assert not any(watch.note(step, {f"{kind}/grad_norm": 1.0}) for step in range(1, 20))
        # 4.5 times (value + the critic's --clip-grad) is the least that counts: (11.5 + 2) / (1 + 2) = 4.5
        assert watch.note(20, {f"{kind}/grad_norm": 11.4}) is None
        assert f"{kind}/grad_norm jumped from 1 " in watch.note(21, {f"{kind}/grad_norm": 11.6})


def test_a_loop_by_hand_may_not_leave_out_what_the_advantages_need(tmp_path):
    one = config(tmp_path)
    assert given_turns(one, [7], [1.0], [2], None, None) is None
    turns = replace(one, episodes=EpisodeConfig(env=("env.py:Env",), turn_rewards=True))
    with pytest.raises(ValueError, match=r"has --turn-rewards, and gets none. Pass \*batch.turns"):
        given_turns(turns, [7], [1.0], [2], None, None)
    assert given_turns(turns, [7], [1.0], [2], [[1.0]], [[2]]) == [TurnRewards([1.0], [2])]
    costs = replace(one, algorithm=REGISTRY["ppo-lagrangian"](cost_score="harm", cost_limit=0.9))
    step = [7], [7], [1.0], {"harm": [1.0]}, {"harm": 1.0}
    with pytest.raises(ValueError, match="with a multiplier, and gets none. Pass multiplier="):
        given_scores(costs, *step, None)
    assert given_scores(costs, *step, 0.5).multiplier == 0.5
    assert given_scores(one, *step, None) is None


@pytest.mark.parametrize(("algorithm", "number"), [("grpo", 0), ("remax", 1)])
def test_a_checkpoint_says_how_many_samples_of_its_groups_are_greedy(tmp_path, algorithm, number):
    state = actor(replace(config(tmp_path), algorithm=REGISTRY[algorithm]()))
    assert "greedy_samples" not in state.snapshot()  # no groups
    state.admit(None, 1)
    saved = state.snapshot()
    assert saved["greedy_samples"] == number and len(saved["buffer"]) == 2
    size = state.config.batch.num_samples_per_prompt + number
    assert {group["num_samples"] for group in saved["buffer"]} == {size}
    other = actor(state.config)
    other.restore(saved)
    assert other.snapshot() == saved

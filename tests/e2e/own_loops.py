"""Loops of one's own for test_python_api.py: `own_loops.py NAME FLAGS`. Each writes what it saw to
NAME.json."""

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import megarl


def sampled_twice(trainer, flow=None):
    """The step's batch, rolled out again: the same rows, as visits and samples of their own."""
    first = trainer.rollout(flow)
    again = trainer.rollout(flow, rows=first.rows)
    assert again.rows == first.rows and {*again.sample_ids}.isdisjoint(first.sample_ids)
    assert {*again.group_ids} == {*again.visits} and {*again.group_ids}.isdisjoint(first.group_ids)
    assert {sample.version for sample in again.samples} == {again.step - 1}  # the sync of the step before
    return again


def by_hand(config, seen: dict) -> None:
    """Every call of a PPO step made by hand, critic on a rank of its own; then a step by a flow, then a
    mistake."""
    actor, critic, reference, reward = megarl.symbolic_roles("actor critic reference reward")
    sampling = actor.rollout().join(reward.score)
    whole = (
        actor.rollout()
        .join(reward.score, actor.log_probs, reference.log_probs, critic.values)
        .advantages(config.algorithm)
        .update(critic)
        .update(actor)
    )
    seen["steps"] = []
    with megarl.PPOTrainer(config) as trainer:
        roles = trainer.roles
        for step in trainer.steps():
            if step == 2:
                seen["steps"].append(trainer.update(sampled_twice(trainer, whole)))
                continue
            batch = sampled_twice(trainer, sampling)
            log_probs = roles.actor.log_probs()
            roles.reference.log_probs()
            roles.critic.values()
            trainer.exchange(["values"], "critic", "actor")
            rewards = [batch.rewards[sample] for sample in batch.sample_ids]
            advantages = roles.actor.advantages(batch.sample_ids, batch.group_ids, rewards, trainer.kl_coef)
            trainer.exchange(["returns"], "actor", "critic")
            trainer.check_gate(log_probs)
            updates = [roles.critic.update(), roles.actor.update(trainer.kl_coef), trainer.sync()]
            seen["steps"].append(trainer.finish(batch, log_probs, advantages, *updates))
        try:
            trainer.update(batch)
        except ValueError as error:
            seen["old_batch"] = str(error)
        try:
            roles.nobody
        except AttributeError as error:
            seen["no_role"] = str(error)
        roles.critic.export_hf(str(Path(config.run.save) / "critic")).result()
        try:
            roles.critic.call("no_such_method").result()
        except megarl.RemoteError as error:
            seen["remote"] = [error.role, error.rank, error.step]
            raise


def plain(config, seen: dict) -> None:
    """The same steps, all left to the algorithm's flow."""
    with megarl.Trainer(config) as trainer:
        seen["steps"] = []
        for _ in trainer.steps():
            seen["steps"].append(trainer.update(sampled_twice(trainer)))


def several(config, seen: dict) -> None:
    """Two that learn independently, at the same time, from different seeds."""
    other = replace(config, batch=replace(config.batch, seed=1), run=replace(config.run, save="other"))
    with (
        megarl.PPOTrainer(config) as first,
        megarl.PPOTrainer(other) as second,
        ThreadPoolExecutor(2) as threads,
    ):

        def step(trainer):
            return trainer.update(sampled_twice(trainer))

        steps = [list(threads.map(step, (first, second))) for _ in range(config.batch.train_iters)]
        seen["steps"], seen["other"] = map(list, zip(*steps))


def waits(config, seen: dict) -> None:
    """Until Ctrl-C."""
    with megarl.Trainer(config) as trainer:
        for _ in trainer.steps():
            trainer.update(trainer.rollout())
            Path("ready").touch()


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job inherits an ignored SIGINT
    name, *flags = sys.argv[1:]
    seen: dict = {}
    try:
        globals()[name](megarl.load_config(*flags), seen)
    finally:
        Path(f"{name}.json").write_text(json.dumps(seen))

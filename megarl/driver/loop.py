"""The training loops: what happens, in what order. Nothing here touches a tensor.

    prompts -> rollout -> rewards -> log-probs, values -> advantages -> update -> new weights into the engine
    -> again

What depends on what within a step is the algorithm's to say (`flow` in megarl/algorithms); the scheduler runs
it. A loop of one's own looks like train_rl: see docs/python_api.md."""

from __future__ import annotations

import math

from megarl.driver.job import Job
from megarl.driver.training import Training


def train_rl(job: Job) -> None:
    """PPO, GRPO and their relatives."""
    training = Training(job)
    training.set_up()
    if not job.checkpoints.is_evaluated:  # of a run that goes on: SIGTERM may have ended its evaluation
        job.evaluate_if_due(training.step)
    if training.step == job.config.batch.train_iters:
        job.export(training.step)  # the job before may have ended just then
    for step in training.steps():
        batch = training.rollout()
        training.update(batch)
        job.evaluate_if_due(step)
        job.checkpoint_if_due(step)
        job.export(step)
    training.wait()


def train_sft(job: Job) -> None:
    """Supervised fine-tuning on the rows' responses; stops early when the loss falls below --exit-loss."""
    actor = job.role("actor")
    job.set_up()
    start, exit_loss = job.checkpoints.restore(), job.config.run.exit_loss or 0.0
    if (
        start == job.config.batch.train_iters
        or job.checkpoints.restored_metrics.get("policy/loss", exit_loss) < exit_loss
    ):
        job.export(start, last=True)  # the job before may have ended just then
        return
    lengths = actor.load_dataset().first()
    for step in job.steps(after=start):
        visits = job.first.cursor.next_visits(job.config.batch.global_batch_size)
        actor.receive_rows(visits, job.plan_visits(visits, lengths))
        job.stop.begin_update()
        metrics = job.finish_sft_step(step, visits.values(), lengths, actor.update())
        last = metrics.get("policy/loss", math.inf) < exit_loss  # without one: no update was made
        job.checkpoint_if_due(step, last=last)
        job.export(step, last=last)
        if last:
            break
    job.checkpoints.wait()

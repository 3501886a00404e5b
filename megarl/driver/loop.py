"""The training loops: what happens, in what order. Nothing here touches a tensor.

    prompts -> rollout -> rewards -> log-probs, values -> advantages -> update -> new weights into the engine -> again

What depends on what within a step is the algorithm's to say (`flow` in megarl/algorithms); the scheduler runs it."""

from __future__ import annotations

from megarl.driver.job import Job
from megarl.driver.scheduler import Scheduler
from megarl.driver.step import StepHost


def train_rl(job: Job) -> None:
    """PPO, GRPO and their relatives."""
    flow = job.config.algorithm.flow(job.meshes)  # what depends on what in a step
    host = StepHost(job)
    scheduler = Scheduler(job.executor, job.meshes, host)
    flow.validate(job.meshes)
    job.set_up()
    job.sync(version=0).result()
    job.evaluate(step=0)
    for step in job.steps():
        host.begin(step, rows=job.cursor.next_rows(job.config.batch.num_prompts))
        results = scheduler.run(flow)
        host.finish(results)
        job.evaluate(step)
        job.export(step)
    scheduler.close()
    scheduler.timeline.write(job.run.folder / "timeline.json")


def train_sft(job: Job) -> None:
    """Supervised fine-tuning on the rows' responses; stops early when the loss falls below --exit-loss."""
    actor = job.role("actor")
    job.set_up()
    lengths = actor.load_dataset().first()
    for step in job.steps():
        rows = job.cursor.next_rows(job.config.batch.global_batch_size)
        plan = job.plan_rows(rows, lengths)
        actor.receive_rows(plan)
        metrics = job.finish_sft_step(step, rows, lengths, actor.update())
        last = metrics["policy/loss"] < (job.config.run.exit_loss or 0.0)
        job.export(step, last=last)
        if last:
            break

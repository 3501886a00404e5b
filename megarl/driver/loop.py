"""The training loops: what happens, in what order. Each line is one call on a role; nothing here touches a tensor.

    prompts -> rollout -> rewards -> log-probs -> advantages -> update -> new weights into the engine -> again

A call returns a future at once. Calls that need no answer are issued together; the workers keep their order."""

from __future__ import annotations

from megarl.driver.job import Job


def train_rl(job: Job) -> None:
    """GRPO and its relatives."""
    actor, rollout, reward, reference = job.role("actor"), job.role("rollout"), job.role("reward"), job.role("reference")
    job.set_up()
    job.sync(version=0).result()
    job.evaluate(step=0)
    for step in job.steps():
        rows = job.cursor.next_rows(job.config.batch.num_prompts)
        generated = rollout.generate("train", rows, step)
        scored = reward.score("train")
        plan = job.plan_step(generated.result(), step)
        job.hand_over(plan)
        gap = actor.log_probs()
        if reference:
            reference.log_probs()
        rewards = job.collect_rewards(plan, scored.result())
        shaped = actor.advantages(plan.sample_ids, plan.group_ids, rewards)
        job.check_gate(gap)
        updated = actor.update()
        synced = job.sync(version=step)
        job.finish_step(step, plan, rewards, gap, shaped, updated, synced)
        job.evaluate(step)
        job.export(step)


def train_sft(job: Job) -> None:
    """Supervised fine-tuning on the rows' responses; stops early when the loss falls below --exit-loss."""
    actor = job.role("actor")
    job.set_up()
    lengths = actor.load_dataset().first()
    for step in job.steps():
        rows = job.cursor.next_rows(job.config.batch.global_batch_size)
        plan = job.plan_rows(rows, lengths)
        actor.receive_rows(plan.mini_batches)
        metrics = job.finish_sft_step(step, plan, actor.update())
        last = metrics["policy/loss"] < (job.config.run.exit_loss or 0.0)
        job.export(step, last=last)
        if last:
            break

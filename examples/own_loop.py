"""A training loop of one's own: shorter answers earn a little more, and training stops when held-out accuracy
is good enough.

    python examples/own_loop.py @configs/quickstart_grpo.args --save runs/own_loop

After `make quickstart`, whose model and data the configuration names. Nothing else starts it: this process is
the driver."""

import sys

import megarl

GOOD_ENOUGH, PRICE_OF_A_TOKEN = 0.9, 0.002

with megarl.Trainer(megarl.load_config(*sys.argv[1:])) as trainer:
    for step in trainer.steps():
        batch = trainer.rollout()
        for sample, length in batch.response_lengths.items():
            if batch.rewards[sample] is not None:  # None: its reward failed
                batch.rewards[sample] -= PRICE_OF_A_TOKEN * length
        metrics = trainer.update(batch)
        print(
            f"step {step}: reward {metrics['reward/mean']:.3f}, length {metrics['response/length_mean']:.1f}",
            flush=True,
        )
        if step % trainer.config.run.eval_interval == 0 and trainer.evaluate()["eval/reward"] >= GOOD_ENOUGH:
            break
    trainer.roles.actor.export_hf(f"{trainer.config.run.save}/hf").result()

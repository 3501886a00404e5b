"""A training loop of one's own with asynchronous rollouts: prompts whose answers all failed are asked again.

    python examples/retry_loop.py @configs/quickstart_grpo.args --save runs/retry --staleness 1

After `make quickstart`, whose model and data the configuration names."""

import sys
from collections import defaultdict

import megarl

with megarl.Trainer(megarl.load_config(*sys.argv[1:])) as trainer:
    for step in trainer.steps():
        batch = trainer.rollout()  # the oldest prompts that were admitted
        best = defaultdict(float)  # row -> best reward
        for sample, row in batch.row_of.items():
            best[row] = max(best[row], batch.rewards[sample] or 0.0)
        failed = [row for row, reward in best.items() if reward == 0]
        trainer.admit(failed)  # before the next rows of the data, as places become free
        metrics = trainer.update(batch)
        age = metrics["staleness/mean"]
        print(
            f"step {step}: asked again {len(failed)}, age {age:.2f}, reward {metrics['reward/mean']:.3f}",
            flush=True,
        )

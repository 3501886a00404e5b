"""The loop of `megarl train`, which also exports the weights of some steps: `pinned_loop.py STEPS FLAGS` writes them to
hf_<step>/, for test_asynchronous.py."""

import sys
from pathlib import Path

import megarl

if __name__ == "__main__":  # engines start their processes by spawn
    steps = {int(step) for step in sys.argv[1].split(",")}
    with megarl.Trainer(megarl.load_config(*sys.argv[2:]), progress=True) as trainer:
        trainer.evaluate_if_due()
        for step in trainer.steps():
            trainer.update(trainer.rollout())
            trainer.evaluate_if_due()
            if step in steps:
                trainer.roles.actor.export_hf(str(Path(trainer.config.run.save) / f"hf_{step}")).result()

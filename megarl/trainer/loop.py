"""The training loop: what happens, in what order. Nothing here touches a tensor.

    prompts -> rollout -> rewards -> log-probs, values -> advantages -> update -> new weights into the engine
    -> again

What depends on what within a step is the algorithm's to say (`flow` in megarl/algorithms). A loop of your own
looks like this one: see docs/python_api.md."""

from __future__ import annotations

from megarl.trainer.trainer import Trainer


def train(trainer: Trainer) -> None:
    """Run all remaining steps of a job, with evaluations, checkpoints and exports where they are due. In
    supervised fine-tuning a batch is rows of the data."""
    if not trainer.checkpointer.is_evaluated:  # SIGTERM may have ended the evaluation of the job before
        trainer.evaluate_if_due()
    if trainer.is_done:
        trainer.export_if_due()  # and its export
    for _step in trainer.steps():
        batch = trainer.rollout()
        trainer.update(batch)
        trainer.evaluate_if_due()
        trainer.checkpoint_if_due()
        trainer.export_if_due()
    trainer.wait()

"""Let references take over the weights of their actors every --reference-update-interval steps.

The weights go through a folder of the run in Hugging Face format, so actor and reference may have any layouts. It
is removed at once: checkpoints hold the reference's weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from megarl.flow import ModelRole, Reference
from megarl.runtime.executor import Executor
from megarl.trainer.run_folder import Run
from megarl.trainer.state import TrainState


def update_references(executor: Executor, roles: Iterable[str], state: TrainState, run: Run) -> None:
    """Update the references for which this step is one of their interval.

    Args:
        roles: names of all roles of the job.
    Raises: RemoteError if a rank fails."""
    for suffix, actor in state.actors.items():
        interval, reference = actor.config.model.reference_update_interval, f"reference{suffix}"
        if interval is None or state.step % interval or reference not in roles:
            continue
        run.attempt.check("the weights of a reference")
        folder = run.folder / f".{reference}.attempt_{run.attempt.number}"
        for left in run.folder.glob(f".{reference}.attempt_*"):  # by a job that was killed meanwhile
            shutil.rmtree(left, ignore_errors=True)
        try:
            ModelRole(executor, actor.actor).export_hf(str(folder)).result()
            Reference(executor, reference).take_weights(str(folder)).result()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        run.progress.note(f"step {state.step}: {reference} has taken over the weights of {actor.actor}")

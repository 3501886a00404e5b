"""Make the optimizer updates of a step, and skip or stop at those that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from megarl.invariants import NonFiniteUpdate
from megarl.metrics import mean_over_updates
from megarl.packing import MiniBatch

if TYPE_CHECKING:
    from megarl.megatron.trained_model import TrainedModel

logger = logging.getLogger(__name__)
MAX_SKIPPED_IN_A_ROW = 10
"""Limit of consecutive skipped updates.

A skipped update leaves the weights as they are, so further retries would hardly end differently."""


class Updates:
    """Makes the optimizer updates of one role on one rank, and counts those that are skipped.

    Args:
        on_nonfinite: see --on-nonfinite."""

    def __init__(self, role: str, on_nonfinite: Literal["stop", "skip"]) -> None:
        self.role, self.skips = role, on_nonfinite == "skip"
        self.skipped_in_a_row = 0

    def over_epochs(
        self,
        model: TrainedModel,
        mini_batches: Sequence[MiniBatch],
        num_epochs: int,
        update: Callable[[MiniBatch], dict[str, float]],
        is_enough: Callable[[dict[str, float]], bool] | None = None,
    ) -> dict[str, float]:
        """Make one optimizer update per mini-batch and epoch, and return this rank's part of the mean
        metrics. Mini-batches of which no sample is learnt from are left out.

        Args:
            update: makes one update, and raises NonFiniteUpdate as `model` does.
            is_enough: returns whether to leave out the epochs after one with these mean metrics, the same on
                all ranks; called after each epoch but the last.
        Returns: the mean over the updates of this rank's part of every metric. The result also has the number
        of skipped updates, and of updates without a sample to learn from, if there are some.
        Raises: NonFiniteUpdate, on all ranks. With --on-nonfinite stop the first such update raises. With
        skip an update raises after MAX_SKIPPED_IN_A_ROW consecutive skipped ones."""
        made, num_unscored, num_made_epochs = [], 0, 0
        for epoch in range(num_epochs):
            num_before, num_made_epochs = len(made), epoch + 1
            for number, mini_batch in enumerate(mini_batches):
                if mini_batch.num_sequences == 0:
                    num_unscored += 1
                    continue
                try:
                    made.append(update(mini_batch))
                    self.skipped_in_a_row = 0
                except NonFiniteUpdate as error:
                    of_epoch = f" in epoch {epoch + 1} of {num_epochs}" if num_epochs > 1 else ""
                    where = f"{self.role}, mini-batch {number + 1} of {len(mini_batches)}{of_epoch}"
                    self._skip_or_stop(f"{where}: {error}", tells=model.reports_steps)
            is_last = epoch + 1 == num_epochs
            if is_enough is not None and not is_last and is_enough(mean_over_updates(made[num_before:])):
                break
        counts: dict[str, float] = {}
        if is_enough is not None and model.reports_steps:
            counts[f"{model.prefix}/epochs"] = num_made_epochs
        if self.skips and model.reports_steps:
            num_skipped = len(mini_batches) * num_made_epochs - len(made) - num_unscored
            counts[f"{model.prefix}/updates_skipped"] = num_skipped
        if num_unscored and model.reports_steps:
            counts[f"{model.prefix}/updates_unscored"] = num_unscored
        return mean_over_updates(made) | counts

    def _skip_or_stop(self, what: str, tells: bool) -> None:
        if not self.skips:
            raise NonFiniteUpdate(
                f"{what}. No weight was changed. Try a lower --lr, or --on-nonfinite skip to go on "
                "without such updates."
            )
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteUpdate(
                f"{what}. So were the {MAX_SKIPPED_IN_A_ROW} updates before it, which --on-nonfinite skip "
                "left out. No weight was changed by them. Try a lower --lr."
            )
        if tells:
            logger.warning("update left out (--on-nonfinite skip): %s", what)

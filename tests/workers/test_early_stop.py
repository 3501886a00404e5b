"""Epochs of a step are left out once one has moved the policy enough.

pytest tests/workers/test_early_stop.py"""

from types import SimpleNamespace

import pytest

from megarl.invariants import NonFiniteUpdate
from megarl.packing import MiniBatch
from megarl.workers.updates import Updates

MINI_BATCHES = [MiniBatch(((),), 5, 1), MiniBatch(((),), 0, 0), MiniBatch(((),), 7, 2)]
"""The second has no scored sample."""
MODEL = SimpleNamespace(reports_steps=True, prefix="policy")


def epochs(limit, kls, num_epochs=4, skips=False):
    """(metrics, means that were judged) of updates with these KLs, None: not finite."""
    left, judged = iter(kls), []

    def update(mini_batch):
        kl = next(left)
        if kl is None:
            raise NonFiniteUpdate("nan")
        return {"policy/kl": kl}

    def is_enough(metrics):
        judged.append(metrics.get("policy/kl"))
        return limit is not None and (judged[-1] or 0.0) > limit

    made = Updates("actor", "skip" if skips else "stop")
    return made.over_epochs(MODEL, MINI_BATCHES, num_epochs, update, is_enough), judged


def test_no_epoch_follows_one_above_the_limit():
    metrics, judged = epochs(0.05, [0.0, 0.02, 0.04, 0.08])
    assert judged == pytest.approx([0.01, 0.06])
    assert metrics == pytest.approx({"policy/kl": 0.035, "policy/epochs": 2, "policy/updates_unscored": 2})


def test_all_epochs_are_made_below_the_limit_and_the_last_is_not_judged():
    metrics, judged = epochs(1.0, [0.1] * 8)
    assert metrics["policy/epochs"] == 4 and len(judged) == 3


def test_skipped_updates_are_counted_in_the_epochs_that_were_made():
    metrics, judged = epochs(0.05, [None, None, 0.2, None], skips=True)
    assert judged == [None, 0.2] and metrics["policy/updates_skipped"] == 3 and metrics["policy/epochs"] == 2


def test_without_the_flag_there_is_no_such_metric():
    made = Updates("actor", "stop").over_epochs(MODEL, MINI_BATCHES, 2, lambda _: {"policy/kl": 9.0})
    assert made == {"policy/kl": 9.0, "policy/updates_unscored": 2}

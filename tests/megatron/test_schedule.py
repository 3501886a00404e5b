"""The schedule of the learning rate, without a model. `pytest tests/megatron/test_schedule.py`"""

from types import SimpleNamespace

import pytest

from megarl.config.role_sections import OptimizerConfig
from megarl.megatron.optimizer import build_scheduler


@pytest.mark.parametrize(
    "values",
    [
        {"min_lr": 1e-5},
        {"lr_warmup_iters": 10, "lr_decay_iters": 5},
        {"lr_warmup_iters": 200},
        {"min_lr": 1e-7, "lr_decay_iters": 50},
    ],
)
def test_a_constant_rate_takes_what_has_no_effect_on_it(values):
    """--min-lr and --lr-decay-iters do nothing then. A critic may get them from the flags of all roles."""
    optimizer = SimpleNamespace(param_groups=[{"params": []}])
    scheduler = build_scheduler(OptimizerConfig(lr=1e-6, **values), optimizer, train_iters=100)
    warmup = values.get("lr_warmup_iters", 0)
    rates = []
    for _ in range(warmup + 100):
        scheduler.step(1)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[warmup:] == [1e-6] * 100
    assert rates[:warmup] == pytest.approx([1e-6 * (step + 1) / warmup for step in range(warmup)], rel=1e-12)

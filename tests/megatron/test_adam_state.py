"""Where the state of PyTorch's Adam is made before its first step, as when a job resumes without Transformer
Engine or apex.

pytest tests/megatron/test_adam_state.py"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.megatron.training_state import _make_state


@pytest.mark.parametrize("group", [{}, {"fused": True}, {"capturable": True}])
def test_adams_counters_are_where_its_own_first_step_makes_them(monkeypatch, group):
    """torch/optim/adam.py, `_init_group`. A fused kernel reads the counter on the device of the parameter;
    "meta" is a device that is not the CPU, where a GPU's would be."""
    monkeypatch.setitem(
        torch.optim.Adam._init_group.__globals__, "_device_dtype_check_for_fused", lambda parameter: None
    )
    ours, theirs = (
        [torch.nn.Parameter(torch.zeros(2, 3, device=device)) for device in ("meta", "cpu")] for _ in range(2)
    )
    made = torch.optim.AdamW(ours, lr=0.1)
    stepped = torch.optim.AdamW(theirs, lr=0.1)
    for adam in (made, stepped):
        adam.param_groups[0] |= group  # as `optimizer._fuse_adam` does
    for parameter in theirs:
        parameter.grad = torch.ones_like(parameter)
    stepped._init_group(stepped.param_groups[0], [], [], [], [], [], [])
    _make_state(SimpleNamespace(optimizer=made, config=None, init_state_fn=lambda adam, config: None))
    for parameter, reference in zip(ours, theirs, strict=True):
        step, wanted = made.state[parameter]["step"], stepped.state[reference]["step"]
        assert (step.device, step.dtype, step.shape) == (wanted.device, wanted.dtype, wanted.shape)

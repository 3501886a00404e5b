"""Switching buffers under a model that computes: tied weights, and what was not written stays."""

from __future__ import annotations

import torch

from megarl.rollout.double_buffer import DoubleBuffer


class Tied(torch.nn.Module):
    """Two layers share one parameter; another has storage of its own with a part that is no destination."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def test_a_switch_changes_every_user_of_the_weights_and_back():
    model, x = Tied(), torch.randn(3, 4)
    tensors = {
        "first": model.first.weight.data,
        "head": model.head.weight.data[:5],
    }
    old, head = model.first.weight.detach().clone(), model.head.weight.detach().clone()
    buffers = DoubleBuffer(model, tensors)
    before = model(x)
    buffers.back["first"].fill_(2.0)
    buffers.back["head"].fill_(3.0)
    assert torch.equal(model(x), before)
    buffers.switch()
    new = torch.cat([torch.full((5, 4), 3.0), head[5:]])  # the sixth row was never written: it is what it was
    assert torch.allclose(model(x), x @ torch.full((4, 4), 2.0) @ torch.full((4, 4), 2.0) @ new.T)
    assert model.second.weight is model.first.weight
    assert buffers.front["first"].data_ptr() == model.first.weight.data_ptr() and buffers.back["first"].equal(
        old
    )
    buffers.switch()
    assert torch.equal(model(x), before)

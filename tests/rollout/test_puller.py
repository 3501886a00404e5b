"""The thread that pulls weights into an engine: which GPU it works on.

pytest tests/rollout/test_puller.py"""

from __future__ import annotations

import threading

import torch

from megarl.rollout.puller import Order, Puller


def test_the_copying_thread_works_on_the_gpu_of_the_engine(monkeypatch):
    """A new thread's current device is 0, whatever its parent's is; handles are opened and copies launched on
    the current one. Stand-ins for CUDA, which is not here."""
    current, calls = threading.local(), []

    def set_device(device: int) -> None:
        current.device = device
        calls.append("set")

    def note(name: str):
        return lambda *args: calls.append((name, getattr(current, "device", 0)))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
    set_device(3)
    calls.clear()
    puller = Puller(0, torch.nn.Module(), {}, double_buffer=False)
    monkeypatch.setattr(
        puller, "copy", lambda destination, copy=puller.copy: (note("copy")(), copy(destination))
    )
    puller.begin(Order(arrivals={}, pulls={}, plan={}))
    assert puller.wait(5.0).problem is None
    assert calls == ["set", ("copy", 3), ("synchronize", 3)]

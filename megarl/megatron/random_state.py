"""Every random number generator of this process that training may draw from: Python's, NumPy's, torch's, Megatron's tracker."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping

import numpy as np
import torch

from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core import tensor_parallel

_TRACKED = "megatron/"


def random_state() -> dict[str, str]:
    """Generator -> its state in base64, of JSON for Python's and NumPy's."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": json.dumps(random.getstate()).encode(), "numpy": json.dumps([kind, keys.tolist(), *rest]).encode(),
             "torch": _to_bytes(torch.get_rng_state())}  # fmt: skip
    if torch.cuda.is_available():
        state["cuda"] = _to_bytes(torch.cuda.get_rng_state())
    with cpu_megatron():
        tracked = tensor_parallel.random.get_cuda_rng_tracker().get_states()
    state |= {f"{_TRACKED}{name}": _to_bytes(of_name) for name, of_name in tracked.items()}
    return {name: base64.b64encode(data).decode() for name, data in state.items()}


def set_random_state(state: Mapping[str, str]) -> None:
    """What `random_state` returned; of generators that are not here (a GPU's on a CPU) nothing is set."""
    data = {name: base64.b64decode(text) for name, text in state.items()}
    version, keys, gauss = json.loads(data["python"])
    random.setstate((version, tuple(keys), gauss))
    kind, keys, *rest = json.loads(data["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_to_tensor(data["torch"]))
    if "cuda" in data and torch.cuda.is_available():
        torch.cuda.set_rng_state(_to_tensor(data["cuda"]))
    with cpu_megatron():
        tracker = tensor_parallel.random.get_cuda_rng_tracker()
        here = tracker.get_states()
        found = {name: _to_tensor(data[f"{_TRACKED}{name}"]) for name in here if f"{_TRACKED}{name}" in data}
        tracker.set_states(here | {name: value for name, value in found.items() if value.numel() == here[name].numel()})


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

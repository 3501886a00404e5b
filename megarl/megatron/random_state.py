"""Save and restore every random number generator of this process that training may draw from.

These are Python's, NumPy's and torch's generators, and Megatron's tracker."""

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
    """Return generator name -> its state, for JSON. Words and bytes are in base64."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    arrays = {
        "python": np.array(words, dtype=np.uint32),
        "numpy": keys,
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available():
        arrays["cuda"] = torch.cuda.get_rng_state().numpy()
    with cpu_megatron():
        tracked = tensor_parallel.random.get_cuda_rng_tracker().get_states()
    arrays |= {f"{_TRACKED}{name}": state.cpu().numpy() for name, state in tracked.items()}
    rest_of = {"python rest": json.dumps([version, gauss]), "numpy rest": json.dumps([kind, *rest])}
    return rest_of | {name: base64.b64encode(values.tobytes()).decode() for name, values in arrays.items()}


def set_random_state(state: Mapping[str, str]) -> None:
    """Restore the states that `random_state` returned.

    States of generators that do not exist here (a GPU's on a CPU) are ignored."""

    def array(name: str, dtype: type = np.uint8) -> np.ndarray:
        return np.frombuffer(bytearray(base64.b64decode(state[name])), dtype=dtype)

    version, gauss = json.loads(state["python rest"])
    random.setstate((version, tuple(array("python", np.uint32).tolist()), gauss))
    kind, *rest = json.loads(state["numpy rest"])
    np.random.set_state((kind, array("numpy", np.uint32), *rest))
    torch.set_rng_state(torch.from_numpy(array("torch")))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(array("cuda")))
    with cpu_megatron():
        tracker = tensor_parallel.random.get_cuda_rng_tracker()
        here = tracker.get_states()
        saved = {
            name: torch.from_numpy(array(f"{_TRACKED}{name}"))
            for name in here
            if f"{_TRACKED}{name}" in state
        }
        tracker.set_states(
            here | {name: values for name, values in saved.items() if len(values) == len(here[name])}
        )

"""Run Megatron-Core on machines without CUDA.

Put `with cpu_megatron():` around every call into Megatron. On a CUDA machine the context does nothing.

Megatron-Core 0.19.2 names CUDA in tensor factories (device="cuda"), type checks (`p.type() ==
"torch.cuda.FloatTensor"`), streams and the RNG tracker. Inside the context these names mean the CPU. Outside,
torch is untouched, so vLLM in the same process never sees the replacements. Entering the context costs a few
microseconds, and operations cost nothing extra.

Every entry was checked against the Megatron version that fixes.py supports. Megatron's own faults are
corrected in fixes.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megarl.megatron.transformer_engine import hide_unusable

hide_unusable()  # every module that uses Megatron imports this module first


def _to_cpu(device: object) -> object:
    """Return the CPU for every CUDA device ('cuda', 'cuda:0', torch.device('cuda'), 0), and any other device
    as it is."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    return "cpu" if isinstance(device, int) and not isinstance(device, bool) else device


def _factory(function):
    def on_cpu(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return on_cpu


_original_type = torch.Tensor.type


def _cuda_type(self, *args, **kwargs):
    """Return the name of the tensor's type with CUDA's prefix, as on a GPU. A call that converts the tensor
    returns the new tensor.

    DistributedOptimizer and clip_grads compare p.type() with 'torch.cuda.FloatTensor'."""
    name = _original_type(self, *args, **kwargs)
    return name.replace("torch.", "torch.cuda.") if isinstance(name, str) and "cuda" not in name else name


class _Stream:
    """A stream or event whose methods do nothing, because CPU operations already run in order."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def _nothing(self, *args, **kwargs) -> None:
        pass

    synchronize = wait_stream = wait_event = record = wait = _nothing

    def record_event(self, *args) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args) -> bool:
        return False


def _nothing(*args, **kwargs) -> None:
    pass


def _swaps() -> list[tuple[object, str, object]]:
    factories = (
        "zeros",
        "empty",
        "ones",
        "full",
        "tensor",
        "arange",
        "rand",
        "randn",
        "zeros_like",
        "empty_like",
        "ones_like",
        "full_like",
    )
    swaps = [(torch, name, _factory(getattr(torch, name))) for name in factories]
    swaps += [
        (torch.Tensor, "type", _cuda_type),
        (torch.Tensor, "cuda", lambda self, *a, **k: self),
        (torch.Tensor, "pin_memory", lambda self, *a, **k: self),
        (torch.Tensor, "record_stream", _nothing),
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "current_stream", lambda *a: _Stream()),
        (torch.cuda, "default_stream", lambda *a: _Stream()),
        (torch.cuda, "get_rng_state", lambda *a, **k: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, *a, **k: torch.set_rng_state(state)),
        (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
    ]
    return swaps


_SWAPS = (
    []
    if torch.cuda.is_available()
    else [(owner, name, getattr(owner, name), new) for owner, name, new in _swaps()]
)
_depth = 0


@contextlib.contextmanager
def cpu_megatron() -> Iterator[None]:
    """Replace, inside this context, the CUDA functions of torch that Megatron calls by CPU versions. On a
    CUDA machine, do nothing.

    The context is re-entrant, but not safe for several threads at once."""
    global _depth
    _depth += 1
    try:
        if _depth == 1:
            for owner, name, _, new in _SWAPS:
                setattr(owner, name, new)
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            for owner, name, old, _ in _SWAPS:
                setattr(owner, name, old)


def _use_cpu_random_state() -> None:
    """Make Megatron's recompute save and restore the CPU's random state in place of CUDA's."""
    import megatron.core.tensor_parallel.random as mcore_random

    mcore_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


if _SWAPS:
    with cpu_megatron():
        _use_cpu_random_state()

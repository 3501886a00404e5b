"""Let Megatron-Core run without CUDA. `with cpu_megatron():` around every call into Megatron; on a CUDA machine it does nothing.

Megatron-Core 0.16.1 names CUDA in tensor factories (device="cuda"), type checks (`p.type() == "torch.cuda.FloatTensor"`),
streams and the RNG tracker. Inside the context those names mean the CPU; outside, torch is untouched, so vLLM in the same
process never sees them. Entering costs a few microseconds and nothing per operation.

What Megatron itself gets wrong on a CPU is corrected once, when this file is imported, by fixes that name the line they are
for. Another Megatron version is refused: every entry was checked against this one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

SUPPORTED_MEGATRON = "0.16.1"


def _to_cpu(device: object) -> object:
    """'cuda', 'cuda:0', torch.device('cuda') and 0 all mean the CPU here."""
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
    """DistributedOptimizer and clip_grads compare p.type() with 'torch.cuda.FloatTensor'."""
    name = _original_type(self, *args, **kwargs)
    return name.replace("torch.", "torch.cuda.") if isinstance(name, str) and "cuda" not in name else name


class _Stream:
    """Everything is already in order on a CPU."""

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
    factories = ("zeros", "empty", "ones", "full", "tensor", "arange", "rand", "randn", "zeros_like", "empty_like", "ones_like", "full_like")
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


_SWAPS = [] if torch.cuda.is_available() else [(owner, name, getattr(owner, name), new) for owner, name, new in _swaps()]
_depth = 0


@contextlib.contextmanager
def cpu_megatron() -> Iterator[None]:
    """CUDA's names mean the CPU inside. Re-entrant; not for several threads at once."""
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


def _reduce_scatter_in_place(output: torch.Tensor, input: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup, async_op: bool) -> None:
    """`output` is this rank's part of `input`; what the other parts hold afterwards is not read."""
    # Not dist.all_reduce: in Megatron's coalescing manager it would be flattened into a copy again.
    group.allreduce(input, op).wait()


def _all_gather_in_place(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
    """`input` is this rank's part of `output`."""
    for work in [group.broadcast(part, root) for root, part in enumerate(output.chunk(group.size()))]:
        work.wait()


def _fix_megatron() -> None:
    import megatron.core
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.tensor_parallel.random as mcore_random

    if megatron.core.__version__ != SUPPORTED_MEGATRON:
        raise RuntimeError(f"megatron-core {megatron.core.__version__} is installed, megarl on CPU was written for {SUPPORTED_MEGATRON}: "
                           f"pip install megatron-core=={SUPPORTED_MEGATRON}")
    mcore_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # random.py:636 says `self.fp8 = fp8 is not None` with default False, so selective recompute of anything but core_attn
    # takes the Transformer Engine branch and dies with a NameError where that is not installed.
    original_init = mcore_random.CheckpointWithoutOutput.__init__

    def init(self, fp8=False):
        original_init(self, fp8)
        self.fp8 = bool(fp8)

    mcore_random.CheckpointWithoutOutput.__init__ = init

    # param_and_grad_buffer.py:285 and :443, on gloo: both copy the whole buffer first (2 GB of gradients for 0.5B parameters),
    # the first gathers into the copy, the second all-reduces it. In place the same sums take no memory and a quarter of the time.
    buffers.dist_reduce_scatter_func, buffers.dist_all_gather_func = _reduce_scatter_in_place, _all_gather_in_place
    _fix_experts()
    # multi_latent_attention.py:62 takes Transformer Engine to be there, as mocks of it can be imported, and :185 asks isinstance of one.
    import megatron.core.transformer.multi_latent_attention as latents

    latents.HAVE_TE = isinstance(latents.TELinear, type)


def _fix_experts() -> None:
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # moe_utils.py:1192 asks whether te_general_gemm is None; without Transformer Engine the name does not exist.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # moe_utils.py:1093 makes lists of split sizes out of CUDA tensors only; all_to_all_single takes no tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    # Expert tensor parallelism gathers and scatters shares of unequal length, which gloo refuses.
    mappings._gather_along_first_dim = _gather_padded(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_padded(mappings._reduce_scatter_along_first_dim)


def _to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def _gather_padded(gather):
    def gather_along_first_dim(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        gathered = gather(_padded(input_, longest), group).split(longest) if longest else [input_]
        return torch.cat([rows[:length] for rows, length in zip(gathered, output_split_sizes)])

    return gather_along_first_dim


def _reduce_scatter_padded(reduce_scatter):
    def reduce_scatter_along_first_dim(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, None, use_global_buffer)
        longest, mine = max(input_split_sizes), input_split_sizes[group.rank()]
        if not longest:
            return input_
        return reduce_scatter(torch.cat([_padded(rows, longest) for rows in input_.split(input_split_sizes)]), group)[:mine]

    return reduce_scatter_along_first_dim


if _SWAPS:
    with cpu_megatron():
        _fix_megatron()

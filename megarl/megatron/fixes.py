"""Replacements for the faults of Megatron-Core 0.19.2, each with the source line that it corrects.

    fix_megatron()              call before the first model is built; refuses every other version
    with world_is(group):       put around the one call that needs it
    with backward_ranges():     no fault: names the backward passes of a schedule for a profiler

Faults that a class in a layer spec can correct are elsewhere: norm and attention (modules.py,
context_parallel.py), latent attention (latent_attention.py), the scale of balancing losses (router.py), steps
with gradients that are not finite (optimizer.py). cpu_shim.py makes CUDA's names mean the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from megarl.config.installed import megatron_error
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.mesh import second_channel
from megarl.ranges import is_recording, profiled


class Fix(NamedTuple):
    """A replacement and the line of megatron/core that it corrects."""

    apply: Callable[[], None]
    file: str
    line: int
    says: str
    """A part of the text of that line."""
    on_cpu_only: bool

    @property
    def name(self) -> str:
        return self.apply.__name__


FIXES: list[Fix] = []


def _fix(
    file: str, line: int, says: str, on_cpu_only: bool = False
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(apply: Callable[[], None]) -> Callable[[], None]:
        FIXES.append(Fix(apply, file, line, says, on_cpu_only))
        return apply

    return register


@functools.cache
def fix_megatron() -> tuple[str, ...]:
    """Apply the fixes that this machine needs, once per process, and return their names.

    Raises: RuntimeError if the installed Megatron-Core is not the version that the fixes are written for."""
    if (error := megatron_error()) is not None:
        raise RuntimeError(error)
    applied = [fix for fix in FIXES if not (fix.on_cpu_only and torch.cuda.is_available())]
    with cpu_megatron():
        for fix in applied:
            fix.apply()
    return tuple(fix.name for fix in applied)


@_fix("tensor_parallel/random.py", 740, "self.fp8 = fp8 is not None")
def recompute_without_transformer_engine() -> None:
    """Make selective recompute work where Transformer Engine is not installed.

    The default of `fp8` is False, which is not None. Selective recompute of anything but core_attn therefore
    takes Transformer Engine's branch, and fails with a NameError where that library is not installed."""
    import megatron.core.tensor_parallel.random as random

    original = random.CheckpointWithoutOutput.__init__

    def init(self, fp8=False):
        original(self, fp8)
        self.fp8 = bool(fp8)

    random.CheckpointWithoutOutput.__init__ = init


@_fix(
    "pipeline_parallel/p2p_communication.py", 75, "even_recv_odd_send_group = torch.distributed.group.WORLD"
)
def second_channel_within_the_mesh() -> None:
    """Use a process group of the role's ranks as the second channel between two pipeline stages.

    Megatron uses the whole world there. A message would then be matched with any other message between the
    two ranks, even with one of another role."""
    import megatron.core.pipeline_parallel.p2p_communication as p2p_communication

    original = p2p_communication._p2p_ops

    def p2p_ops(*, group: dist.ProcessGroup, **messages) -> dict[str, dist.Work]:
        with patch.object(dist, "group", SimpleNamespace(WORLD=second_channel(group))):
            return original(group=group, **messages)

    p2p_communication._p2p_ops = p2p_ops


@_fix("transformer/moe/moe_utils.py", 1184, "if torch.is_tensor(tensor) and tensor.is_cuda", on_cpu_only=True)
def split_sizes_of_the_all_to_all() -> None:
    """Make Megatron convert split sizes in CPU tensors to lists, as it does with CUDA tensors, before an
    all-to-all.

    Megatron converts only CUDA tensors, and all_to_all_single does not accept tensors."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


@_fix("tensor_parallel/mappings.py", 154, "torch.distributed.all_gather", on_cpu_only=True)
def uneven_shares_on_gloo() -> None:
    """Pad parts of unequal length, which expert tensor parallelism gathers and scatters and gloo refuses."""
    import megatron.core.tensor_parallel.mappings as mappings

    mappings._gather_along_first_dim = _gather_padded(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_padded(
        mappings._reduce_scatter_along_first_dim
    )


@_fix("distributed/param_and_grad_buffer.py", 712, "dist_reduce_scatter_func(", on_cpu_only=True)
def distributed_optimizer_in_place() -> None:
    """Run the distributed optimizer's collectives in place on gloo.

    On gloo the reduce-scatter and the gather of line 515 first copy the whole buffer (2 GB of gradients for
    0.5B parameters). The reduce-scatter all-reduces the copy, and the gather writes into the copy. In place,
    the same sums need no memory and a quarter of the time."""
    import megatron.core.distributed.param_and_grad_buffer as buffers

    buffers.dist_reduce_scatter_func, buffers.dist_all_gather_func = (
        _reduce_scatter_in_place,
        _all_gather_in_place,
    )


@_fix(
    "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py",
    4038,
    "with _coalescing_manager(",
    on_cpu_only=True,
)
def gathers_of_their_own() -> None:
    """Replace Megatron-FSDP's coalesced gathers by separate ones, because several coalesced gathers in flight
    crash PyTorch 2.13.0's gloo.

    The error is "malloc(): unaligned tcache chunk detected". AddressSanitizer shows that two threads of a
    group free the same 20 bytes in ProcessGroupGloo::runLoop. The bytes are most likely the name
    ALLGATHER_COALESCED, which is recorded without a lock. Plain gathers and reductions do not crash: their
    names are short enough to need no heap memory."""
    import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as buffers

    buffers._coalescing_manager = _not_coalesced


@contextlib.contextmanager
def world_is(group: dist.ProcessGroup) -> Iterator[None]:
    """Make all_gather_object and get_world_size of torch.distributed work on `group` by default inside this
    context.

    optimizer/__init__.py:363 agrees on the order of parameter groups over the whole world, and would wait for
    ranks that are not on this mesh."""
    gather, world_size = dist.all_gather_object, dist.get_world_size
    within = dict(
        all_gather_object=lambda out, value, group=group: gather(out, value, group=group),
        get_world_size=lambda group=group: world_size(group),
    )
    with patch.multiple(dist, **within):
        yield


@contextlib.contextmanager
def backward_ranges() -> Iterator[None]:
    """Mark the backward pass of each micro-batch as a range inside this context, if a profiler records.

    All of Megatron's schedules call one function of their module for it."""
    if not is_recording():
        yield
        return
    from megatron.core.pipeline_parallel import schedules

    with patch.object(schedules, "backward_step", profiled("micro_batch/backward")(schedules.backward_step)):
        yield


@contextlib.contextmanager
def _not_coalesced(group: dist.ProcessGroup, async_ops: bool = False) -> Iterator[SimpleNamespace]:
    """Replace torch.distributed._coalescing_manager by separate gathers.

    Yields an object whose `wait` waits for the gathers that were started inside."""
    works, gather = [], dist.all_gather_into_tensor

    def noted(*args: object, **kwargs: object) -> dist.Work | None:
        works.append(gather(*args, **kwargs))
        return works[-1]

    with patch.object(dist, "all_gather_into_tensor", noted):
        yield SimpleNamespace(wait=lambda: [work.wait() for work in works])


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
        return reduce_scatter(
            torch.cat([_padded(rows, longest) for rows in input_.split(input_split_sizes)]), group
        )[:mine]

    return reduce_scatter_along_first_dim


def _reduce_scatter_in_place(
    output: torch.Tensor, input: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup, async_op: bool
) -> None:
    """Sum `input` over the ranks; `output` is this rank's part of `input`.

    The other parts hold partial results afterwards, which nobody reads."""
    # Not dist.all_reduce: Megatron's coalescing manager would flatten it into a copy again.
    group.allreduce(input, op).wait()


def _all_gather_in_place(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> None:
    """Gather the parts of all ranks into `output`; `input` is this rank's part of `output`."""
    for work in [group.broadcast(part, root) for root, part in enumerate(output.chunk(group.size()))]:
        work.wait()

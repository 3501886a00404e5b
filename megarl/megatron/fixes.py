"""Everything that is wrong in Megatron-Core 0.16.1 for us and is put right by replacing it, each with the
line that it is for.

    fix_megatron()              before the first model is built; refuses every other version
    with world_is(group):       around the one call that needs it

What can be put right by a class of our own in a layer's specification is not here: norm and attention
(modules.py, context_parallel.py), latent attention (latent_attention.py), the scale of balancing losses
(router.py), steps with gradients that are not finite (optimizer.py). That CUDA's names mean the CPU is
cpu_shim.py."""

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


class Fix(NamedTuple):
    """A replacement, and the line of megatron/core that it is for."""

    apply: Callable[[], None]
    file: str
    line: int
    says: str
    """Part of that line."""
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
    """Apply what this machine needs, once per process. Returns the names of the fixes.

    Raises: RuntimeError for another version of Megatron-Core than the one that they were written for."""
    if (finding := megatron_error()) is not None:
        raise RuntimeError(finding)
    applied = [fix for fix in FIXES if not (fix.on_cpu_only and torch.cuda.is_available())]
    with cpu_megatron():
        for fix in applied:
            fix.apply()
    return tuple(fix.name for fix in applied)


@_fix("tensor_parallel/random.py", 636, "self.fp8 = fp8 is not None")
def recompute_without_transformer_engine() -> None:
    """The default is False, which is not None: selective recompute of all but core_attn takes Transformer
    Engine's branch, and dies with a NameError where that is not installed."""
    import megatron.core.tensor_parallel.random as random

    original = random.CheckpointWithoutOutput.__init__

    def init(self, fp8=False):
        original(self, fp8)
        self.fp8 = bool(fp8)

    random.CheckpointWithoutOutput.__init__ = init


@_fix(
    "pipeline_parallel/p2p_communication.py", 74, "even_recv_odd_send_group = torch.distributed.group.WORLD"
)
def second_channel_within_the_mesh() -> None:
    """Between two stages the whole world is the second channel: a message would be matched with any other
    that is under way between the two ranks, of another role too."""
    import megatron.core.pipeline_parallel.p2p_communication as p2p_communication

    p2p_communication._p2p_ops = _p2p_ops


@_fix("transformer/moe/moe_utils.py", 1192, "if te_general_gemm is not None")
def router_without_transformer_engine() -> None:
    """Where that is not installed the name does not exist."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@_fix("transformer/multi_latent_attention.py", 62, "HAVE_TE = True")
def latent_attention_without_transformer_engine() -> None:
    """It is taken to be there because mocks of it can be imported; line 185 then asks whether something is an
    instance of one."""
    import megatron.core.transformer.multi_latent_attention as latents

    latents.HAVE_TE = isinstance(latents.TELinear, type)


@_fix("transformer/moe/moe_utils.py", 1093, "if torch.is_tensor(tensor) and tensor.is_cuda", on_cpu_only=True)
def split_sizes_of_the_all_to_all() -> None:
    """Only CUDA tensors become lists of numbers, and all_to_all_single takes no tensors."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


@_fix("tensor_parallel/mappings.py", 150, "torch.distributed.all_gather", on_cpu_only=True)
def uneven_shares_on_gloo() -> None:
    """Expert tensor parallelism gathers and scatters shares of unequal length, which gloo refuses."""
    import megatron.core.tensor_parallel.mappings as mappings

    mappings._gather_along_first_dim = _gather_padded(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_padded(
        mappings._reduce_scatter_along_first_dim
    )


@_fix("distributed/param_and_grad_buffer.py", 443, "dist_reduce_scatter_func(", on_cpu_only=True)
def distributed_optimizer_in_place() -> None:
    """On gloo this and the gather of line 285 copy the whole buffer first (2 GB of gradients for 0.5B
    parameters); the first all-reduces the copy, the second gathers into it. In place the same sums take no
    memory and a quarter of the time."""
    import megatron.core.distributed.param_and_grad_buffer as buffers

    buffers.dist_reduce_scatter_func, buffers.dist_all_gather_func = (
        _reduce_scatter_in_place,
        _all_gather_in_place,
    )


@_fix(
    "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py",
    3607,
    "with _coalescing_manager(",
    on_cpu_only=True,
)
def gathers_of_their_own() -> None:
    """PyTorch 2.13.0's gloo dies of several coalesced gathers in flight ("malloc(): unaligned tcache chunk
    detected"). AddressSanitizer: a group's two threads free the same 20 bytes in ProcessGroupGloo::runLoop;
    most likely the name ALLGATHER_COALESCED, noted without a lock. Gathers that are not coalesced, and
    reductions, do not do it: their names are short enough to need no memory of their own."""
    import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as buffers

    buffers._coalescing_manager = _not_coalesced


@contextlib.contextmanager
def world_is(group: dist.ProcessGroup) -> Iterator[None]:
    """optimizer/__init__.py:180 agrees on the order of parameter groups over the whole world, which would
    wait for ranks that are not on this mesh. Inside, the world is the mesh."""
    gather, world_size = dist.all_gather_object, dist.get_world_size
    dist.all_gather_object = lambda out, value, group=group: gather(out, value, group=group)
    dist.get_world_size = lambda group=group: world_size(group)
    try:
        yield
    finally:
        dist.all_gather_object, dist.get_world_size = gather, world_size


def _p2p_ops(
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
    group: dist.ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, dist.Work]:
    """Start the messages of one turn. Between two ranks each direction has a group of its own, so that
    neither waits for the other."""
    sends, receives = (
        (group, second_channel(group)) if group.rank() % 2 == 0 else (second_channel(group), group)
    )
    forward = [
        ("send_next", dist.isend, tensor_send_next, next_pipeline_rank, sends),
        ("recv_prev", dist.irecv, tensor_recv_prev, prev_pipeline_rank, receives),
    ]
    backward = [
        ("send_prev", dist.isend, tensor_send_prev, prev_pipeline_rank, sends),
        ("recv_next", dist.irecv, tensor_recv_next, next_pipeline_rank, receives),
    ]
    in_order = (
        forward + backward if group.rank() % 2 == 0 else forward[::-1] + backward[::-1]
    )  # even ranks send first, odd ones receive
    return {
        name: start(tensor, peer, group=channel)
        for name, start, tensor, peer, channel in in_order
        if tensor is not None
    }


@contextlib.contextmanager
def _not_coalesced(group: dist.ProcessGroup, async_ops: bool = False) -> Iterator[SimpleNamespace]:
    """In the place of torch.distributed._coalescing_manager: yields what waits for the gathers that are
    started inside."""
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
    """`output` is this rank's part of `input`; what the other parts hold afterwards is not read."""
    # Not dist.all_reduce: in Megatron's coalescing manager it would be flattened into a copy again.
    group.allreduce(input, op).wait()


def _all_gather_in_place(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> None:
    """`input` is this rank's part of `output`."""
    for work in [group.broadcast(part, root) for root, part in enumerate(output.chunk(group.size()))]:
        work.wait()

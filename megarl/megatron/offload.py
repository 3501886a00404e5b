"""Move a model's memory between the device and pinned host memory while other roles work.

    parameters   copied out and back; every tensor stays the same object with the same views, but its address
                 changes
    gradients    freed, and returned as zeros, because every update starts from zeros
    optimizer    Adam's moments and, under bf16, the fp32 master weights are copied out and back; step
                 counters stay

    memory.offload(["gradients", "optimizer"])    device -> host
    memory.load(["parameters", "optimizer"])      host -> device
    memory.use("optimizer")                       call before any computation with a part

Nothing waits on the host: each direction has its own stream, ordered by events. `use` makes the current
stream wait for a part to arrive, so the optimizer's part may still be in transfer during the forward and
backward passes. On a CPU no byte moves, but the bookkeeping is the same. A call that uses an offloaded part
therefore fails on a CPU too, and `resident_bytes` is the number of bytes that a device would hold."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from megarl.config.role_sections import OFFLOAD_PARTS
from megarl.megatron.inner_optimizers import inner_optimizers, local
from megarl.ranges import profile_range

PIECE_BYTES = 256 << 20
"""Size of one allocation of pinned memory.

PyTorch rounds an allocation up to a power of two, which could double the size of a single allocation."""


class Frozen(Protocol):
    """Attributes that `ModelMemory` reads of a model that is not trained."""

    chunks: list[torch.nn.Module]
    device: torch.device


class Trained(Frozen, Protocol):
    """Attributes that `ModelMemory` reads of a model that has gradients and an optimizer."""

    optimizer: Any
    """Megatron's optimizer, or None if the model is frozen."""
    ddp: list[Any]
    """Megatron's data-parallel wrappers of the chunks."""
    sharded: list[Any]
    """The wrappers in `ddp` if Megatron-FSDP shards the parameters, else an empty list."""


class ModelMemory:
    """Moves parameters, gradients and optimizer state of one model on this rank between device and host.

    Args:
        model: a Megatron model, or a frozen model of another library.
        owner: name of the role, for errors."""

    def __init__(self, model: Trained | Frozen, owner: str) -> None:
        self.owner, self._model = owner, model
        self._parts = OFFLOAD_PARTS if getattr(model, "optimizer", None) is not None else ("parameters",)
        self._lasting = {part: self._find(part) for part in self._parts if part != "optimizer"}
        self._copies = _Copies(model.device) if model.device.type == "cuda" else None
        self._away: dict[
            str, list[tuple[torch.UntypedStorage, int]]
        ] = {}  # part -> its storages and their sizes in bytes

    def add(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        """Add later tensors to a part (parameters or gradients) that is on the device, so that they move with
        it."""
        self._lasting[part] += [tensor.untyped_storage() for tensor in tensors]

    def offload(self, parts: Collection[str]) -> None:
        """Copy these parts to host memory and free their device memory; gradients are only freed.

        Parts that are already away, or that a frozen model lacks, are skipped."""
        for part in self._parts:
            if part in parts and part not in self._away:
                self._away[part] = storages = [
                    (storage, storage.nbytes()) for storage in self._storages(part)
                ]
                if self._copies is not None:
                    with profile_range("offload/to_host"):
                        self._copies.take(part, storages, keep=part != "gradients")

    def load(self, parts: Collection[str]) -> None:
        """Start to copy these parts back, in the order in which an update uses them.

        Parts that are on the device are skipped."""
        for part in self._parts:
            if part in parts and part in self._away:
                storages = self._away.pop(part)
                if self._copies is not None:
                    with profile_range("offload/to_device"):
                        self._copies.give(part, storages, keep=part != "gradients")

    def use(self, *parts: str) -> None:
        """Make the current CUDA stream wait until these parts have arrived on the device, or raise
        RuntimeError if one is still offloaded."""
        for part in parts:
            if part in self._away:
                raise RuntimeError(
                    f"[{self.owner}] {part}: in host memory (--offload) when a call used it. "
                    "Declare it on the role's method, "
                    f'@needs("{part}"), or call memory.load(["{part}"]) first.'
                )
            if self._copies is not None:
                self._copies.await_arrival(part)

    def part_bytes(self, part: str) -> int:
        """Return the size of one part, on or off the device, or 0 if the model has no such part."""
        if part in self._away:
            return sum(size for _, size in self._away[part])
        return self.resident_bytes(part)

    def resident_bytes(self, part: str | None = None) -> int:
        """Return the bytes of one part, or of all parts, that are on the device."""
        parts = self._parts if part is None else {part} & {*self._parts}
        return sum(storage.nbytes() for p in parts if p not in self._away for storage in self._storages(p))

    def unallocated_bytes(self) -> int:
        """Return the bytes that the first update will allocate for Adam's two fp32 moments on the device."""
        total = 0
        for inner in inner_optimizers(getattr(self._model, "optimizer", None)):
            adam = inner.optimizer
            if hasattr(adam, "cpu_optimizers"):  # Megatron's hybrid optimizer has the other part on the host
                adam = adam.gpu_optimizer
            for group in adam.param_groups if adam is not None else ():
                total += sum(8 * local(p.data).numel() for p in group["params"] if not adam.state.get(p))
        return total

    def take_copy_seconds(self) -> float:
        """Return the duration of the copies that ended since the last call, in seconds; 0 on a CPU."""
        return self._copies.take_seconds() if self._copies is not None else 0.0

    def _storages(self, part: str) -> list[torch.UntypedStorage]:
        # The optimizer's moments exist only from the first step on, so they are looked up each time.
        return self._lasting[part] if part in self._lasting else self._find(part)

    def _find(self, part: str) -> list[torch.UntypedStorage]:
        """Return the storages of the tensors of one part (parameters, gradients, optimizer), each storage
        once.

        The optimizer's storages exclude the parameters' storages, which its shards of fp32 parameters
        share."""
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors(part)}
        for storage in self._lasting["parameters"] if part == "optimizer" else ():
            found.pop(storage._cdata, None)
        return list(found.values())

    def _tensors(self, part: str) -> Iterator[torch.Tensor]:
        model, sharded = self._model, getattr(self._model, "sharded", ())
        if part == "parameters":
            whole = [ddp.whole_parameters.values() for ddp in sharded]
            yield from (
                parameter.data
                for parameters in whole or [chunk.parameters() for chunk in model.chunks]
                for parameter in parameters
            )
        elif part == "gradients":
            for ddp in model.ddp:
                if ddp in sharded:
                    yield from ddp.param_and_grad_buffer.buffer.values()
                else:
                    yield from (buffer.grad_data for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers))
        else:
            for inner in inner_optimizers(model.optimizer):
                adam = inner.optimizer
                yield from (local(p.data) for group in adam.param_groups for p in group["params"])
                values = (value for state in adam.state.values() for value in state.values())
                yield from (local(value) for value in values if torch.is_tensor(value) and value.dim())


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams for copies out and in, which all models of the process share.

    The allocator keeps free memory by stream, so one model can get the memory that another model frees."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class _Copies:
    """Copies between one model's storages on a GPU and pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self._out, self._in = _streams(device)
        self._host: dict[str, list[torch.Tensor]] = {}
        self._left: dict[str, torch.cuda.Event] = {}
        self._arrived: dict[str, torch.cuda.Event] = {}
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def take(self, part: str, storages: Sequence[tuple[torch.UntypedStorage, int]], keep: bool) -> None:
        """Copy a part to the host (if `keep`) and free it, after all queued work of the current stream."""
        here = torch.cuda.current_stream()
        self._out.wait_stream(here)
        if part in self._arrived:  # the part may have been loaded and never used
            self._out.wait_event(self._arrived[part])
        if keep:
            self._make_room(part, sum(size for _, size in storages))
        with torch.cuda.stream(self._out):
            start, at = self._record(), 0
            for storage, size in storages:
                tensor = _as_bytes(storage)
                for host, piece in self._pieces(part, tensor, at) if keep else ():
                    host.copy_(piece, non_blocking=True)
                at += size
                # the allocator must not reuse the memory before both streams are done
                for stream in (self._out, here):
                    tensor.record_stream(stream)
                storage.resize_(0)
            self._left[part] = self._record()
        self._timed.append((start, self._left[part]))

    def give(self, part: str, storages: Sequence[tuple[torch.UntypedStorage, int]], keep: bool) -> None:
        """Allocate a part again, and fill it from the host (if `keep`) or with zeros."""
        self._in.wait_event(self._left[part])
        with torch.cuda.stream(self._in):
            start, at = self._record(), 0
            for storage, size in storages:
                storage.resize_(size)
                tensor = _as_bytes(storage)
                if not keep:
                    tensor.zero_()
                for host, piece in self._pieces(part, tensor, at) if keep else ():
                    piece.copy_(host, non_blocking=True)
                at += size
            self._arrived[part] = self._record()
        self._timed.append((start, self._arrived[part]))

    def await_arrival(self, part: str) -> None:
        if part in self._arrived:
            torch.cuda.current_stream().wait_event(self._arrived[part])

    def take_seconds(self) -> float:
        ended = [pair for pair in self._timed if pair[1].query()]
        self._timed = [pair for pair in self._timed if pair not in ended]
        return sum(start.elapsed_time(end) for start, end in ended) / 1e3

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _make_room(self, part: str, num_bytes: int) -> None:
        if sum(map(len, self._host.get(part, ()))) < num_bytes:
            self._host.pop(part, None)
            self._host[part] = [
                torch.empty(min(PIECE_BYTES, num_bytes - at), dtype=torch.uint8, pin_memory=True)
                for at in range(0, num_bytes, PIECE_BYTES)
            ]

    def _pieces(
        self, part: str, tensor: torch.Tensor, at: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (host, device) slices of equal length that together are `tensor`.

        The tensor begins at byte `at` of the part."""
        done = 0
        while done < len(tensor):
            number, start = divmod(at + done, PIECE_BYTES)
            count = min(PIECE_BYTES - start, len(tensor) - done)
            yield self._host[part][number][start : start + count], tensor[done : done + count]
            done += count


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage itself as a uint8 tensor [num_bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

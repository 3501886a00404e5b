"""Share a CUDA storage as an IPC handle that other processes of the node open.

PyTorch's own handle names the allocation and the place in it. The handle keeps the memory while a peer has it
open, and works for the caching allocator's blocks (and for expandable segments). Handles are made once per
storage. A new address needs a new export, so the first sync after an offload exports again. Reads go over
NVLink or PCIe peer access, on the reader's stream."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor


class CudaMemory(msgspec.Struct, frozen=True, tag=True):
    """Location of a CUDA storage of another process."""

    device_uuid: str
    """UUID of the device. Device numbers differ between processes with other visible devices."""
    handle: tuple[bytes | None, int, int, bytes | None, int, bytes | None, bool | None]
    """Arguments of UntypedStorage._new_shared_cuda after the device; some are None for an empty storage."""
    num_bytes: int


def share(storage: torch.UntypedStorage) -> CudaMemory:
    """Return the location of a CUDA storage, by which a peer opens it. It must not be freed while a peer
    reads it."""
    device, *handle = storage._share_cuda_()
    return CudaMemory(device_uuid(device), tuple(handle), storage.nbytes())


def open_shared(segment: CudaMemory) -> Tensor:
    """Open the storage as uint8 [num_bytes] for kernels of the current device, wherever the memory is.

    The handle is opened on the current device. CUDA maps the memory there, and enables peer access if the
    memory belongs to another device (cudaIpcMemLazyEnablePeerAccess in c10/cuda/CUDACachingAllocator.cpp). A
    kernel on this device cannot use an address that was opened on the memory's own device. PyTorch reports
    the current device as the tensor's device.

    Raises: RuntimeError if this process cannot see or read the device that has the memory."""
    owner, here = device_index(segment.device_uuid), torch.cuda.current_device()
    if owner != here and not torch.cuda.can_device_access_peer(here, owner):
        raise RuntimeError(
            f"GPU {here} cannot read GPU {owner} of the same node directly. Use --reshard-transport messages."
        )
    storage = torch.UntypedStorage._new_shared_cuda(here, *segment.handle)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def device_uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def device_index(uuid: str) -> int:
    """Return the index of the GPU with this UUID in this process.

    Raises: RuntimeError if the process sees no such device."""
    for device in range(torch.cuda.device_count()):
        if device_uuid(device) == uuid:
            return device
    raise RuntimeError(
        f"GPU {uuid}, which holds the weights, is not among the {torch.cuda.device_count()} that "
        "this process sees. "
        "Let it see all of the node's (CUDA_VISIBLE_DEVICES), or use --reshard-transport messages."
    )

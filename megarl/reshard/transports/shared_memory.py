"""Share a CPU storage as memory that other processes of the node map.

PyTorch moves the storage itself, so every view follows: parameters, DDP buckets, the optimizer's shards.
PyTorch keeps an open file without a name, which peers reach as /proc/<pid>/fd/<fd>. Nothing is therefore left
in /dev/shm, however the job ends."""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path

import msgspec
import torch
from torch import Tensor

_FOLDER = "/dev/shm"


class SharedMemory(msgspec.Struct, frozen=True, tag=True):
    """Location of a CPU storage of another process."""

    pid: int
    started: int
    """Start time of the process in the kernel's ticks, because another process may get the same pid."""
    fd: int
    inode: int
    """Inode of the file, because the same file descriptor may come to mean another file."""
    num_bytes: int


def share(storage: torch.UntypedStorage) -> SharedMemory:
    """Move `storage` into shared memory in place, unless it is already there, and return its location.

    The storage stays there for its lifetime.

    Raises: OSError if the node has too little shared memory (a write into missing pages would kill the
    process)."""
    if not storage.is_shared():
        free = os.statvfs(_FOLDER)
        if storage.nbytes() > free.f_bavail * free.f_frsize:
            raise OSError(
                f"{storage.nbytes():,} bytes of weights must be shared with another process and "
                f"{_FOLDER} has "
                f"{free.f_bavail * free.f_frsize:,} left. Give the container more (docker run "
                "--shm-size), or use "
                "--reshard-transport messages."
            )
    fd, num_bytes = (
        storage._share_fd_cpu_()
    )  # the call of Tensor.share_memory_(), whatever the process-wide sharing strategy
    return SharedMemory(os.getpid(), process_start(os.getpid()), fd, os.fstat(fd).st_ino, num_bytes)


def open_shared(segment: SharedMemory) -> Tensor:
    """Map the storage read-only as uint8 [num_bytes]. The mapping lives as long as the tensor.

    Raises: ProcessLookupError if the storage or its process is gone."""
    if process_start(segment.pid) != segment.started:
        raise ProcessLookupError(f"process {segment.pid}, which holds the weights, has ended")
    fd = os.open(f"/proc/{segment.pid}/fd/{segment.fd}", os.O_RDONLY)
    try:
        if os.fstat(fd).st_ino != segment.inode:
            raise ProcessLookupError(f"process {segment.pid} no longer has the weights where it said")
        mapped = mmap.mmap(fd, segment.num_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # PyTorch warns about a tensor of a read-only buffer, but this tensor is only read
        return torch.frombuffer(mapped, dtype=torch.uint8)


def process_start(pid: int) -> int:
    """Return the start time of a process in ticks since boot; -1 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        return -1

"""The backend "nccl" of the emulated devices: communicators over gloo, made as late as NCCL makes them.

A communicator is made by the first operation of a group on a device, and by the first message between two
ranks outside of a batch. All its ranks must take part. NCCL would wait for the others for ever; this backend
reports them. It also reports two ranks on one device, as NCCL does, and ranks that disagree about the group,
which happens when groups are created in different orders."""

from __future__ import annotations

import itertools
import json
import os
import time
from datetime import timedelta
from types import SimpleNamespace

import _hostcuda
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo


class _NamedNccl(type):
    """Takes every backend that calls itself nccl for an instance: the native class is unknown to Python."""

    def __instancecheck__(cls, backend: object) -> bool:
        name = getattr(backend, "name", None)
        return callable(name) and name() == "nccl"


class ProcessGroupNCCL(metaclass=_NamedNccl):
    """Creates the backend with the arguments that torch.distributed passes to PyTorch's."""

    class Options:
        """What torch.distributed sets for a group."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""
            self._timeout = timedelta(minutes=10)
            self.split_from = None

    def __new__(cls, store, rank: int, size: int, options: ProcessGroupNCCL.Options):
        return _hostcuda.make_nccl(rank, size, _Communicators(store, rank, size, options))


class _Communicators:
    """Makes the communicators of one group."""

    def __init__(self, store, rank: int, size: int, options: ProcessGroupNCCL.Options) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._ranks = list(options.global_ranks_in_group) or list(range(size))
        self._name, self._timeout = options.group_name, options._timeout
        self._numbers = itertools.count()

    def __call__(self, device: int, peer: int) -> ProcessGroupGloo:
        members = list(range(self._size)) if peer < 0 else sorted((self._rank, peer))
        key = f"communicator{next(self._numbers)}" if peer < 0 else f"pair{members[0]}:{members[1]}"
        self._store.set(f"{key}/{self._rank}", json.dumps([device, self._ranks]))
        self._await(key, members)
        facts = {member: json.loads(self._store.get(f"{key}/{member}")) for member in members}
        for member, (_, ranks) in facts.items():
            if ranks != self._ranks:
                raise RuntimeError(
                    f"[hostnccl] group {self._name} has ranks {self._ranks} on rank "
                    f"{self._ranks[self._rank]} and {ranks} on another: the groups "
                    "were not created in the same order on all ranks"
                )
            twins = [other for other in members if facts[other][0] == facts[member][0]]
            if len(twins) > 1:
                raise RuntimeError(
                    f"[hostnccl] Duplicate GPU detected: ranks {self._globally(twins)} of group "
                    f"{self._name} are all on CUDA device {facts[member][0]}"
                )
        store = PrefixStore(f"{key}/gloo", self._store)
        return ProcessGroupGloo(store, members.index(self._rank), len(members), timeout=self._timeout)

    def _await(self, key: str, members: list[int]) -> None:
        limit_s = min(float(os.environ.get("HOSTNCCL_TIMEOUT_S", 60)), self._timeout.total_seconds())
        deadline = time.monotonic() + limit_s
        missing = members
        while missing := [member for member in missing if not self._store.check([f"{key}/{member}"])]:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"[hostnccl] rank {self._ranks[self._rank]} makes a communicator of group "
                    f"{self._name} (ranks {self._globally(members)}), and ranks {self._globally(missing)} "
                    f"have not taken part in "
                    f"{limit_s:g} s. NCCL would wait for ever."
                )
            time.sleep(0.005)

    def _globally(self, members: list[int]) -> list[int]:
        return [self._ranks[member] for member in members]

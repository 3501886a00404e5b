"""vLLM's worker with faults in the copy of the weights, one per line of the file $FAULTS names, taken in
order.

none    slow    flip (a bit of one destination tensor, after the copy)    kill (the process, in the middle)"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from megarl.reshard.destination import Destination
from megarl.rollout.puller import Puller
from megarl.rollout.worker import NamedCPUWorker

SLOW_S = 2.0
_copy = Puller.copy


def copy_with_faults(self: Puller, destination: Destination) -> None:
    file = Path(os.environ["FAULTS"])
    fault, *rest = file.read_text().split() if file.exists() else ["none"]
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "slow":
        time.sleep(SLOW_S)
    _copy(self, destination)
    if fault == "flip":
        view = destination._views[min(destination._views)][0]  # the first tensor of the plan: the embedding
        view.view(torch.int32)[3:4] ^= (
            # a whole row: 1/130 of the tensor; sampled digests find a 32nd for certain, --check-weight-sync
            # all
            1
        )
    if file.exists():
        file.write_text("\n".join(rest) or "none")


Puller.copy = copy_with_faults


class FaultyWorker(NamedCPUWorker):
    pass

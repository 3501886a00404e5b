"""A rank that says that it is there, and then meets the others again and again, until the file that the variable
ENDS names exists, or until another rank is gone."""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
print(f"attempt {os.environ['MEGARL_ATTEMPT']} of rank {dist.get_rank()}", flush=True)
print(f"launcher {os.environ['MEGARL_LAUNCHER']}", flush=True)
ends = [False]
while not ends[0]:
    ends = [Path(os.environ["ENDS"]).exists()]
    try:
        dist.broadcast_object_list(ends)
    except RuntimeError:
        sys.exit(1)
    time.sleep(0.05)

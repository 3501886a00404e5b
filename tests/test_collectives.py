"""Messages of different lengths between the ranks of a group, over gloo.

pytest tests/test_collectives.py"""

from __future__ import annotations

from tests.launch import run_ranks

RANK = """
import sys
import torch.distributed as dist
from megarl.collectives import all_gather_messages
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], world_size=3, rank=rank)
pair = dist.new_group([0, 2])
own = ["x" * 1000] * rank
assert all_gather_messages(own, list[str]) == [[], ["x" * 1000], ["x" * 1000] * 2]
if rank != 1:
    assert all_gather_messages({rank: None}, dict[int, str | None], pair) == [{0: None}, {2: None}]
dist.barrier()
"""


def test_every_rank_gets_the_messages_of_all_in_order(tmp_path):
    run_ranks(3, lambda rank: ["-P", "-c", RANK, tmp_path / "world", rank], timeout=120)

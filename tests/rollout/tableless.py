"""Importing this takes away all tables of vLLM's layouts, in the trainer's process; its worker does so in
vLLM's."""

from __future__ import annotations

from megarl.reshard.vllm_atlas import TABLES
from megarl.rollout.worker import NamedCPUWorker

TABLES.clear()


class TablelessWorker(NamedCPUWorker):
    pass

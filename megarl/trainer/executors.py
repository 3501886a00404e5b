"""Executors of a training job: who builds the roles, and where they run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.config.roles import trains_in_fp32
from megarl.config.schema import TrainConfig
from megarl.runtime.process import compute_fp32_exactly, keep_checkout_off_path

if TYPE_CHECKING:
    from megarl.runtime.inline_executor import InlineExecutor


@contextlib.contextmanager
def inline_ranks(config: TrainConfig) -> Iterator[InlineExecutor]:
    """Build the roles of a world of one rank, which is this process, and the executor that calls them."""
    keep_checkout_off_path()
    if trains_in_fp32(config):
        compute_fp32_exactly()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    from megarl.runtime.inline_executor import InlineExecutor
    from megarl.workers.worker import build_roles, join_world

    join_world(config.placement.call_timeout_s)
    executor = InlineExecutor(build_roles(config, world_size=1))
    yield executor
    executor.shutdown()


def remove_engine_memory() -> None:
    """Remove the shared memory of engines that were killed."""
    from megarl.rollout.environment import sweep_shared_memory

    sweep_shared_memory()

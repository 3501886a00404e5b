"""Asynchronous rollouts cost little code. `pytest tests/trainer/test_size_of_streaming.py`"""

from __future__ import annotations

from pathlib import Path

import megarl

PACKAGE = Path(megarl.__file__).parent
BUFFER = ("trainer/buffer.py", "trainer/groups.py", "trainer/routing.py", "trainer/group_future.py")
"""On the driver: admitted prompts and their samples, the engine of each, and the wait of a step."""
STREAMING = ("workers/request_stream.py", "workers/engine_steps.py", "workers/held_out.py")
"""On the ranks: requests that outlive a call, and the steps of engines between calls.

Not counted are data/cursor.py and workers/answer.py, which synchronous training needs too, and
workers/episode_stream.py and workers/open_episode.py, which are the turns of agents and environments."""
LOOP_BEFORE = 27  # lines of trainer/loop.py before rollouts could be asynchronous


def num_lines(*names: str) -> int:
    return sum(len((PACKAGE / name).read_text().splitlines()) for name in names)


def test_buffer_and_streaming_have_at_most_900_lines_and_the_loop_15_more_than_before():
    assert num_lines(*BUFFER, *STREAMING) <= 900
    assert num_lines("trainer/loop.py") <= LOOP_BEFORE + 15

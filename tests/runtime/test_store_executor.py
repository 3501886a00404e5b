"""The executor of ranks that are processes, without any. `pytest tests/runtime/test_store_executor.py`"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megarl.runtime import store_executor
from megarl.runtime.channel import Channel
from megarl.runtime.messages import Call, Kill, read_command, signed_command
from megarl.runtime.store_executor import StoreExecutor


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_calls", [0, 1])
def test_a_signal_while_a_command_is_signed_leaves_the_number_of_the_next_one(monkeypatch, num_calls):
    """The ranks refuse a command of another number as one of another process."""

    def sign(index, command):
        if isinstance(command, Call) and index == num_calls:
            raise KeyboardInterrupt
        return signed_command(index, command)

    monkeypatch.setattr(store_executor, "signed_command", sign)
    executor = StoreExecutor({"actor": [0]}, 1, 60.0, dist.HashStore())
    rank = Channel(executor._tree.address)
    for index in range(num_calls):
        executor.call("actor", "update")
        assert isinstance(read_command(index, rank.next_message()), Call)
    with pytest.raises(KeyboardInterrupt):
        executor.call("actor", "update", bytes(1 << 20))
    executor.kill(130)
    assert read_command(num_calls, rank.next_message()) == Kill(130)
    rank.close()

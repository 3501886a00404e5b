"""A rank answers its driver however long it was not asked. `pytest tests/runtime/test_mailbox.py`"""

from __future__ import annotations

from tests.launch import succeed

ASKED_LATE = """
import os, time
from datetime import timedelta

import torch.distributed as dist

from megarl.runtime import mailbox
from megarl.runtime.shutdown_listener import ABORT_CALLS, ALL_RANKS_KNOW, PING, ShutdownListener
from megarl.runtime.worker_loop import answer_health

LONGEST_GET_S = 0.1
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
driver = mailbox.Mailbox(mailbox.connect())
mailbox.FOREVER = timedelta(seconds=LONGEST_GET_S)
listener, health = ShutdownListener(0), answer_health(0)
for number in range(2):
    time.sleep(5 * LONGEST_GET_S)
    assert 0 in driver.ask_health(number, [0], 60.0), "no sign of life"
for key, value in ((PING, "asked"), (ABORT_CALLS, "7")):
    time.sleep(5 * LONGEST_GET_S)
    assert driver.ask_all(key, [0], 60.0, value) == [], f"no answer to {key}"
time.sleep(5 * LONGEST_GET_S)
driver.set(ALL_RANKS_KNOW, "end")
driver.end_health(2)
listener.join(60.0)
health.join(60.0)
assert not health.is_alive() and not listener._thread.is_alive()
"""


def test_a_rank_answers_after_more_time_than_the_store_waits():
    """As after 20 days, without a question until then."""
    succeed("-c", ASKED_LATE, timeout=240, preloaded=True, environment={"TORCH_CPP_LOG_LEVEL": "ERROR"})

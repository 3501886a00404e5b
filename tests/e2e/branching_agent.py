"""An agent whose episodes are trees. Half of the episodes are a single conversation.

With the argument `slow` it works for a while at some calls, has two requests at a time, and tells the time."""

import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.episodes.asking import ask, ask_all

row = json.loads(sys.stdin.readline())
is_slow = "slow" in sys.argv
first, second = ask_all(row["prompt"], n=2)
told = "1"
if is_slow:
    aside = threading.Thread(target=ask, args=([{"role": "user", "content": "1+1 ?"}],))
    aside.start()
    time.sleep(0.5 * (len(first) % 3 == 0))
    told = f"{time.time_ns() % 1000}"
more = [{"role": "assistant", "content": first}, {"role": "user", "content": told}]
ask([*row["prompt"], *more])
if len(first) % 2:
    ask([*row["prompt"], *more[:1], {"role": "user", "content": "2"}])  # goes on from an earlier answer
    ask(row["prompt"])
if is_slow:
    aside.join()
print(json.dumps({"reward": len(second) / 10}))

"""Agents of test_agent_pool.py: `python agents.py` reads a row whose "what" says how to behave."""

import json
import os
import sys
import threading
import time
import urllib.error
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.episodes.asking import ask, ask_all


def branching(messages):
    """Ten answers: two to one request, a continuation of each, the first request twice more, an edited past,
    and a sub-agent of two turns, whose requests wait at the same time as another one."""
    both = ask_all(messages, n=2)
    for text in both:
        ask([*messages, {"role": "assistant", "content": text}, {"role": "tool", "content": "on"}])
    for _ in range(2):
        ask(messages)
    ask([*messages, {"role": "assistant", "content": "edited"}, {"role": "tool", "content": "on"}])
    other = [{"role": "system", "content": "sub-agent"}, *messages]
    waiting = threading.Thread(target=ask, args=([{"role": "user", "content": "aside"}],))
    waiting.start()
    ask([*other, {"role": "assistant", "content": ask(other)}, {"role": "tool", "content": "on"}])
    waiting.join()


def main(row):
    what, messages = row["what"], [{"role": "user", "content": f"start {row['what']}"}]
    if what == "silent":
        return print(1.0)
    if what == "branches":
        try:
            branching(messages)
        except urllib.error.HTTPError as error:
            refused = json.load(error)["error"]
            print(refused)
            ask([*messages, {"role": "assistant", "content": "two"}, {"role": "tool", "content": "still"}])
            return print(-1.0 if (error.code, refused["code"]) == (400, "too_many_branches") else "wrong")
        return print(0.5)
    if what == "closed":  # waits for its answer with a closed stdout
        os.close(1)
    if what == "child":  # a grandchild that outlives the agent, and holds its stdout
        os.system("sleep 60 &")
    for turn in range(3 if what != "endless" else 100):
        try:
            text = ask(messages, **row.get("how", {}))
        except urllib.error.HTTPError as error:
            refusal = json.load(error)["error"]
            if what != "endless":
                raise
            print("refused", refusal["code"])
            return print(json.dumps({"reward": 0.25 * turn}))
        if what == "hang":
            time.sleep(60)
        if what == "exit":
            sys.exit(3)
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": f"{turn} {text}"}]
    if what == "secret":
        return print(float("MEGARL_JOB_SECRET" in os.environ))
    if what == "no reward":
        return print("good bye")
    print("noise" * row.get("noise", 1))
    print(json.dumps({"reward": 0.75}))


main(json.loads(sys.stdin.readline()))

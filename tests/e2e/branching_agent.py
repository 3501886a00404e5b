"""An agent whose episodes are trees, for test_agents_job.py. Half of the episodes are a single conversation.

It uses no SDK: it would take a second to import."""

import json
import os
import sys
import urllib.request


def ask(messages, **how):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **how}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        return [choice["message"]["content"] for choice in json.load(reply)["choices"]]


row = json.loads(sys.stdin.readline())
first, second = ask(row["prompt"], n=2)
more = [{"role": "assistant", "content": first}, {"role": "user", "content": "1"}]
ask([*row["prompt"], *more])
if len(first) % 2:
    ask([*row["prompt"], *more[:1], {"role": "user", "content": "2"}])  # goes on from an earlier answer
    ask(row["prompt"])
print(json.dumps({"reward": len(second) / 10}))

"""The environment `Slow` of envs.py as an agent, without an SDK."""

import json
import os
import sys
import time
import urllib.request

row = json.loads(sys.stdin.readline())
messages, total = [*row["prompt"]], 0.0
for _ in range(4):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError:  # a limit
        break
    if (row["extra_info"]["index"] + len(text)) % 3 == 0:
        time.sleep(0.5)
    total += sum(c.islower() for c in text) / 20
    if not any(c.isdigit() for c in text):
        break
    messages += [
        {"role": "assistant", "content": text},
        {"role": "tool", "content": f"{len(text)} characters"},
    ]
print(json.dumps({"reward": total}))

"""The program of megarl_counting.py: two requests of a growing conversation."""

import json
import sys
import urllib.request

endpoint, secret, model, prompt = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
for turn in range(2):
    request = urllib.request.Request(
        f"{endpoint}/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        answer = json.load(reply)["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": f"more {turn}"}]

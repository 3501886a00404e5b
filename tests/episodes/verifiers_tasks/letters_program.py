"""The program of megarl_letters.py: the game of tests/e2e/letters.py as an agent."""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "e2e"))
from letters import reply_to

endpoint, secret, model, prompt = sys.argv[1:]
messages, reply = [{"role": "user", "content": prompt}], ""
while reply is not None:
    request = urllib.request.Request(
        f"{endpoint}/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as found:
            answer = json.load(found)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if error.code != 400 or len(messages) == 1:
            raise
        break  # the episode is at one of its limits
    reply = reply_to(answer["content"])
    messages += [answer, {"role": "tool", "content": reply}]

"""Agents of test_agent_pool.py: `python agents.py` reads a row whose "what" says how to behave. No SDK: it would
take a second to import."""

import json
import os
import sys
import time
import urllib.error
import urllib.request


def ask(messages, **how):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **how}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def main(row):
    what, messages = row["what"], [{"role": "user", "content": f"start {row['what']}"}]
    if what == "silent":
        return print(1.0)
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

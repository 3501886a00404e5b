"""An agent of test_tool_calls.py: calls tools over the endpoint in a conversation of several turns. No SDK."""

import json
import os
import random
import sys
import urllib.error
import urllib.request

TEXTS = ["42", "é", "日本 🙂", "\n\n", "  ", '{"a": "\\u00e9"}', "error", "<tool_call>", "", "thirty is"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Works with é and 日本.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
        },
    }
    for name in ("add", "find")
]


def ask(messages, **how):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": TOOLS, **how}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def main(row):
    rng = random.Random(row["seed"])
    messages, num_calls = [{"role": "user", "content": " ".join(rng.choices(TEXTS, k=3)) + "?"}], 0
    for _ in range(rng.randint(2, 5)):
        message = ask(messages)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            num_calls += 1
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            text = " ".join(rng.choices(TEXTS, k=3))
            messages.append({"role": "tool", "content": text, "tool_call_id": call["id"]})
        if not message.get("tool_calls"):
            messages.append({"role": "user", "content": " ".join(rng.choices(TEXTS, k=2)) + "?"})
    print(num_calls)


if __name__ == "__main__":
    main(json.loads(sys.stdin.readline()))

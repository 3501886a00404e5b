"""An agent of test_tool_calls.py: calls tools over the endpoint in a conversation of several turns. No SDK.

With the argument `anthropic` it speaks Anthropic's dialect."""

import json
import os
import random
import sys
import urllib.error
import urllib.request
from pathlib import Path

if __name__ == "__main__":  # not for the test that imports it: vLLM would find the folder triton_kernels
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.episodes.asking import ask_messages

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
    return ask_messages(messages, tools=TOOLS, **how)[0]


def ask_anthropic(messages):
    """The same request and answer in Anthropic's form: results of tools are blocks of the user's messages."""
    written = []
    for message in messages:
        blocks = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if message["role"] == "tool":
            blocks = [
                {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            ]
        blocks += [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": json.loads(arguments),
            }
            for call in message.get("tool_calls") or ()
            for arguments in [call["function"]["arguments"]]
        ]
        role = "assistant" if message["role"] == "assistant" else "user"
        if written and written[-1]["role"] == role:
            written[-1]["content"] += blocks
        else:
            written.append({"role": role, "content": blocks})
    tools = [
        {name: one["function"][name] for name in ("name", "description")}
        | {"input_schema": one["function"]["parameters"]}
        for one in TOOLS
    ]
    request = urllib.request.Request(
        os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
        json.dumps({"model": "policy", "max_tokens": 4000, "messages": written, "tools": tools}).encode(),
        {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        blocks = json.load(reply)["content"]
    calls = [
        {"id": one["id"], "function": {"name": one["name"], "arguments": json.dumps(one["input"])}}
        for one in blocks
        if one["type"] == "tool_use"
    ]
    text = "".join(one["text"] for one in blocks if one["type"] == "text")
    return {"role": "assistant", "content": text, "tool_calls": calls}


def main(row):
    rng = random.Random(row["seed"])
    messages, num_calls = [{"role": "user", "content": " ".join(rng.choices(TEXTS, k=3)) + "?"}], 0
    for _ in range(rng.randint(2, 5)):
        message = ask_anthropic(messages) if "anthropic" in sys.argv else ask(messages)
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

"""The game of letters.py as an agent on an SDK: `letters_agent.py openai`, `anthropic`, or `anthropic tools`, which
offers a tool, too."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
from letters import reply_to, reward_of

TOOL = {
    "name": "add",
    "description": "a + b",
    "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}},
}


def with_openai(messages):
    """Return a function that asks for an answer to the messages, and one that adds the reply to it."""
    import openai

    client = openai.OpenAI()

    def ask():
        completion = client.chat.completions.create(model="policy", messages=messages)
        return completion.choices[0].message.content

    def add(text, reply):
        messages.extend([{"role": "assistant", "content": text}, {"role": "tool", "content": reply}])

    return ask, add, openai.BadRequestError


def with_anthropic(messages):
    import anthropic

    client, how = anthropic.Anthropic(), {"tools": [TOOL]} if "tools" in sys.argv else {}

    def ask():
        message = client.messages.create(model="policy", messages=messages, max_tokens=1000, **how)
        return "".join(block.text for block in message.content if block.type == "text")

    def add(text, reply):
        result = {"type": "tool_result", "tool_use_id": "add", "content": reply}
        messages.extend([{"role": "assistant", "content": text}, {"role": "user", "content": [result]}])

    return ask, add, anthropic.BadRequestError


row = json.loads(sys.stdin.readline())
ask, add, refusal = (with_openai if sys.argv[1] == "openai" else with_anthropic)([*row["prompt"]])
total = 0.0
while True:
    try:
        text = ask()
    except refusal as error:
        if "context_length_exceeded" not in str(error):
            raise
        break  # the episode is at one of its limits
    total += reward_of(text)
    if (reply := reply_to(text)) is None:
        break
    add(text, reply)
print(json.dumps({"reward": total}))

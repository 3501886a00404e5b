"""The calculator of examples/calculator_agent.py with Anthropic's SDK. With the argument `tools` it offers the
calculator as a tool, too."""

import json
import re
import sys

import anthropic

row = json.loads(sys.stdin.readline())
client = anthropic.Anthropic()
messages = row["prompt"]
tool = {
    "name": "add",
    "description": "a + b",
    "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}},
}
how = {"tools": [tool]} if "tools" in sys.argv else {}
reward = 0.0
while True:
    try:
        message = client.messages.create(model="policy", messages=messages, max_tokens=1000, **how)
    except anthropic.BadRequestError as error:
        if "context_length_exceeded" not in str(error):
            raise
        break  # the episode is at one of its limits, and there is no answer to judge
    text = "".join(block.text for block in message.content if block.type == "text")
    if "####" in text:
        reward = float(text.split("####")[-1].strip() == row["reward_model"]["ground_truth"])
        break
    found = re.fullmatch(r"(\d{1,9})([+-]\d{1,9})", text.strip())
    result = int(found[1]) + int(found[2]) if found else "error"
    result = {"type": "tool_result", "tool_use_id": "add", "content": str(result)}
    messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": [result]}]
print(json.dumps({"reward": reward}))

"""The calculator of calculator_env.py as an agent that calls the model with OpenAI's SDK.

    --agent-command "python examples/calculator_agent.py"

in the place of --env in a copy of configs/calculator_grpo.args. It imports nothing of megarl. The SDK reads the
endpoint and the key from OPENAI_BASE_URL and OPENAI_API_KEY."""

import json
import re
import sys

import openai

row = json.loads(sys.stdin.readline())
client = openai.OpenAI()
messages = row["prompt"]
reward = 0.0
while True:
    try:
        completion = client.chat.completions.create(model="policy", messages=messages)
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        break  # the episode is at one of its limits, and there is no answer to judge
    text = completion.choices[0].message.content
    if "####" in text:
        reward = float(text.split("####")[-1].strip() == row["reward_model"]["ground_truth"])
        break
    found = re.fullmatch(r"(\d{1,9})([+-]\d{1,9})", text.strip())
    result = int(found[1]) + int(found[2]) if found else "error"
    messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": str(result)}]
print(json.dumps({"reward": reward}))

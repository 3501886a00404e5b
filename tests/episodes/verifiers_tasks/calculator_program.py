"""The program of megarl_calculator.py: the calculator of examples/calculator_env.py as an agent."""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from calculator_env import Calculator

endpoint, secret, model, prompt = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
calculator, done = Calculator(), False
calculator.truth = None  # verifiers scores the answer
while not done:
    request = urllib.request.Request(
        f"{endpoint}/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            answer = json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if error.code != 400 or len(messages) == 1:
            raise
        break  # the episode is at one of its limits
    replies, _, done = calculator.step(answer["content"])
    messages += [answer, *replies]

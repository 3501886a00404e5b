"""The agent of test_agent_load.py: loses connections at random, and asks again as an SDK does, until it has an answer.

It tells each answer that it got in its next message. No SDK, and no import of megarl."""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import zlib
from urllib.parse import urlsplit

URL, KEY = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
PATIENCE_S = (0.2, 1.0, 30.0)
"""Seconds that the agent waits for an answer, by the number of attempts; then always the last."""


def asked(rng: random.Random, body: dict, attempt: int) -> str | None:
    """Return the text of the answer; None if the connection was lost, or the agent ran out of patience."""
    data = json.dumps(body).encode()
    connection = http.client.HTTPConnection(
        URL.hostname, URL.port, timeout=PATIENCE_S[min(attempt, len(PATIENCE_S) - 1)]
    )
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in {
        "Authorization": f"Bearer {KEY}",
        "Content-Length": str(len(data)),
        "x-stainless-retry-count": str(attempt),
    }.items():
        connection.putheader(name, value)
    fault = rng.choice(["none", "half a request", "no answer", "half an answer"]) if attempt < 4 else "none"
    try:
        connection.endheaders(data[: len(data) // 2] if fault == "half a request" else data)
        if fault in ("half a request", "no answer"):
            return None
        reply = connection.getresponse()
        if fault == "half an answer":
            reply.read(rng.randint(0, 60))
            return None
        text = reply.read().decode()
    except (TimeoutError, ConnectionError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    assert reply.status == 200, (reply.status, text)
    return content_of(text, body["stream"])


def content_of(text: str, is_stream: bool) -> str:
    if not is_stream:
        return json.loads(text)["choices"][0]["message"]["content"]
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", text
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    return "".join(delta.get("content") or "" for delta in deltas)


def main(row: dict) -> None:
    rng, num_lost = random.Random(row["seed"]), 0
    messages = [{"role": "user", "content": f"start {row['seed']}"}]
    for turn in range(row["num_turns"]):
        body = {"model": "policy", "messages": messages, "stream": rng.random() < 0.5}
        attempt = 0
        while (text := asked(rng, body, attempt)) is None:
            attempt += 1
            num_lost += 1
        said = f"{turn} {zlib.crc32(text.encode())}"
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": said}]
    print(json.dumps({"reward": num_lost}))


main(json.loads(sys.stdin.readline()))

"""The agent of test_branch_fuzz.py: sends many requests of a branching conversation, some of them mutated.
Prints how many were answered and refused.

No SDK, and no import of megarl."""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.episodes.mutations import mutated


class Endpoint:
    def __init__(self) -> None:
        self.url, self.key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]

    def post(self, path: str, data: bytes, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=60)
        connection.request("POST", path, data, {"Authorization": f"Bearer {self.key}", **headers})
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text


def valid_chat(rng: random.Random, mark: str, known: list[list[dict]]) -> dict:
    """A request that goes on from an answer, repeats a request, edits the past, or begins a conversation."""
    messages = [*rng.choice(known)]
    kind = rng.choice(["go on", "go on", "again", "edit", "new"])
    if kind == "again" and len(messages) > 1:
        messages = messages[:-1]
    elif kind == "edit":
        at = rng.randrange(len(messages))
        messages[at] = {**messages[at], "content": f"{mark} edited {rng.randrange(9)}"}
    elif kind == "new":
        messages = [{"role": "system", "content": f"{mark} sub-agent {rng.randrange(9)}"}]
    if messages[-1]["role"] == "assistant" or kind == "new":
        messages.append({"role": rng.choice(["user", "tool"]), "content": f"{mark} {rng.randrange(9)}"})
    body = {"model": "policy", "messages": messages, "stream": False, "max_tokens": rng.randint(1, 8)}
    return body | ({"n": rng.randint(1, 3)} if rng.random() < 0.3 else {})


def main(row: dict) -> None:
    rng, mark, endpoint = random.Random(row["seed"]), row["mark"], Endpoint()
    known = [[{"role": "user", "content": f"{mark} start"}]]
    counts = {"valid": 0, "limits": 0, "answered": 0, "refused": 0}
    for _ in range(row["count"]):
        body = valid_chat(rng, mark, known)
        is_valid = rng.random() < 0.4
        data = json.dumps(body).encode() if is_valid else mutated(rng, body)
        headers = {"x-stainless-retry-count": "1"} if rng.random() < 0.1 else {}
        status, text = endpoint.post("/v1/chat/completions", data, **headers)
        for other in row["others"]:
            assert other not in text, (data, text)
        if status == 200:
            counts["valid" if is_valid else "answered"] += 1
            if is_valid:
                choices = json.loads(text)["choices"]
                assert len(choices) == body.get("n", 1), text
                known += [[*body["messages"], choice["message"]] for choice in choices]
            else:
                assert "data: [DONE]" in text if text.startswith("data") else json.loads(text)["choices"], (
                    text
                )
            continue
        error = json.loads(text)["error"]
        assert 400 <= status < 500 and error["message"] and endpoint.key not in text, (status, text)
        assert not is_valid or error["code"] in ("too_many_branches", "context_length_exceeded"), text
        counts["limits" if is_valid else "refused"] += 1
    print(json.dumps({**counts, "reward": 1.0}))


main(json.loads(sys.stdin.readline()))

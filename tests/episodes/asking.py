"""Requests of the tests' agents to the endpoint, without an SDK: to import one takes a second."""

import json
import os
import urllib.request


def ask_messages(messages, **how):
    """The messages of all answers to one request."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **how}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=600) as reply:
        return [choice["message"] for choice in json.load(reply)["choices"]]


def ask_all(messages, **how):
    """The texts of all answers to one request."""
    return [message["content"] for message in ask_messages(messages, **how)]


def ask(messages, **how):
    return ask_all(messages, **how)[0]

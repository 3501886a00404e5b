"""Read the tool calls that a model wrote in the form of Hermes, which Qwen2.5 and Qwen3 write, too."""

from __future__ import annotations

import json
import re
from typing import Any

from megarl.episodes.json_values import json_problem

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def read_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls in an answer, in order: `{"name": ..., "arguments": {...}}`.

    Of a call that cannot be read there is `{"error": "error: ..."}`, a text for the model."""
    return [_call(found.strip()) for found in _CALL.findall(text)]


def _call(text: str) -> dict[str, Any]:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return {"error": 'error: a call must be {"name": ..., "arguments": {...}} between <tool_call> tags'}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return {"error": "error: the name of a call must be a string, and its arguments an object"}
    found = {"name": name, "arguments": arguments}
    if (problem := json_problem(found, "call", any_integer=True)) is not None:
        return {"error": f"error: {problem}"}
    return found

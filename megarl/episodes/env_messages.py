"""Define the messages between an environment pool and its processes: lines of JSON in both directions.

    {"call": 7, "op": "reset", "episode": 3, "row": {...}}
        {"call": 7, "messages": [...]}
    {"call": 8, "op": "step", "episode": 3, "text": "1+2"}
        {"call": 8, "messages": [...], "reward": null, "done": false}
    {"op": "end", "episode": 3}

A process writes {"ready": true} first, or {"error": "..."} if the environment cannot be loaded."""

from __future__ import annotations

from typing import Any

import msgspec

Cause = str
"""Why an episode has no reward: "raised", "timeout", "died", "malformed", "refused" (by the chat template) or
"unreachable" (a server)."""
CAUSES: tuple[Cause, ...] = ("raised", "timeout", "died", "malformed", "refused", "unreachable")


class EnvReply(msgspec.Struct, frozen=True):
    """A line that an environment process has written."""

    ready: bool = False
    error: str | None = None
    """Why the environment cannot be loaded."""
    call: int | None = None
    """Number of the call that this line replies to."""
    messages: list[dict[str, Any]] = []
    """Messages for the model."""
    tools: list[dict[str, Any]] = []
    """With the first messages: tools that the chat template shows to the model, in OpenAI's form."""
    reward: float | None = None
    done: bool = False
    actor: str | None = None
    """Name of the actor that answers next; None is the first one."""
    rewards: dict[str, float | None] | None = None
    """Name of each actor -> its reward, in place of `reward`."""
    failure: str | None = None
    """Why the call failed."""
    cause: Cause = "raised"


_DECODER = msgspec.json.Decoder(EnvReply)


def read_reply(line: bytes) -> EnvReply:
    """Return the reply in a line. Raises: ValueError if the line is no reply."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error

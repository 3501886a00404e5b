"""Define the model's answers as the endpoint of agents gives them: text, reasoning, and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megarl.episodes.chat import Message
from megarl.episodes.environments import Usage
from megarl.episodes.json_values import json_problem

Tool = dict[str, Any]
"""A tool in OpenAI's form, {"type": "function", "function": {"name": ..., "parameters": {...}}}."""
ParsedAnswer = tuple[str | None, str | None, Sequence[tuple[str | None, str, str]]]
"""(text, reasoning, calls). A call is (the id that the model wrote or None, name, arguments as JSON)."""
UNREADABLE = [(None, "", "")]
"""The calls of an answer whose calls cannot be read."""


class AnswerParser(Protocol):
    """Splits an answer into text, reasoning and tool calls. A worker gives it to the agents' pool."""

    takes_tools: bool
    """Whether it finds tool calls."""

    def parse(
        self, prompt: Sequence[int], ids: Sequence[int], tools: Sequence[Tool], wants_calls: bool
    ) -> ParsedAnswer:
        """Return the text, the reasoning and the tool calls of an answer.

        Args:
            prompt: ids before the answer.
            ids: the sampled ids.
            tools: tools of the conversation.
            wants_calls: whether the request allows calls."""
        ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model has written in an answer."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer of the model to a request."""

    text: str
    usage: Usage
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    """The sampled ids, for a request of token ids."""
    log_probs: tuple[float, ...] = ()
    """Log-prob of each of them."""
    stop: str | None = None
    """Text that has ended it, and is no part of `text`."""

    def until(self, stops: Sequence[str]) -> Completion:
        """Return the completion without the first of these texts and what follows it."""
        found = [(self.text.index(stop), stop) for stop in stops if stop in self.text]
        end, stop = min(found, default=(None, None))
        return replace(self, text=self.text[:end], stop=stop)

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation, with which later requests are compared."""
        found: Message = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            found["tool_calls"] = [
                called(call.id, call.name, json.loads(call.arguments)) for call in self.tool_calls
            ]
        return found


def called(index: str | None, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as a dict in the form that chat templates read."""
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if index is None else {"id": index, **call}


def completion_of(parsed: ParsedAnswer, text: str, usage: Usage, num_calls: int) -> Completion:
    """Return the completion of a parsed answer. If a call cannot be read, the answer has no calls, and its
    text is the whole answer.

    Ids of calls are counted within the episode and not random, as a chat template may write them into the
    next prompt, and a repeated run must have the same tokens.

    Args:
        text: the whole answer.
        num_calls: number of calls in the episode's earlier answers."""
    content, reasoning, found = parsed
    calls = []
    for number, (index, name, arguments) in enumerate(found, num_calls):
        if not _is_readable(name, arguments):
            return Completion(text, usage, reasoning)
        # nine letters and digits: templates in the manner of Mistral's refuse others
        calls.append(ToolCall(index or f"call{number:05d}", name, arguments))
    return Completion(content or "", usage, reasoning, tuple(calls))


def _is_readable(name: str, arguments: str) -> bool:
    """Return whether clients can read a call, and whether the endpoint takes it when they send it back."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    call = {"name": name, "arguments": found}
    return isinstance(found, dict) and json_problem(call, "call", any_integer=True) is None

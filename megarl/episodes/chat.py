"""Continue a conversation in token ids, without encoding again what was sampled.

A chat template turns messages into text. If the whole conversation were rendered and encoded anew for each
turn, the model's own answers would often become other ids than those that were sampled. `Chat.suffix`
therefore returns only what the template puts behind the last answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

Message = dict[str, Any]
Arguments = Mapping[str, Any] | None
"""What a chat template reads besides messages and tools, by name."""
_MARKER = "\u241fanswer{}\u241f"


class Tokenizer(Protocol):
    """The methods of a tokenizer that a conversation uses; see megarl/data/tokenizer_base.py."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), arguments: Arguments = None
    ) -> str: ...
    def encode_prompts(
        self,
        prompts: Sequence[Sequence[Message]],
        tools: Sequence[Message] = (),
        arguments: Arguments = None,
    ) -> list[list[int]]: ...
    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]: ...


class Chat:
    """Encodes the messages of conversations with a model's chat template.

    Args:
        eos_ids: the model's end-of-sequence ids. Each of them ends a turn.
        stop_ids: --stop-token-ids. One of them ends a turn if the chat template writes it there."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int], stop_ids: Iterable[int] = ()) -> None:
        self._tokenizer, self._eos_ids = tokenizer, frozenset(eos_ids)
        self._stop_ids = self._eos_ids.union(stop_ids)

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), arguments: Arguments = None
    ) -> list[int]:
        """Return the ids of a first prompt, up to and including the assistant's header.

        Raises: ValueError if the chat template refuses the messages."""
        return self._tokenizer.encode_prompts([list(messages)], tools, arguments)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return self._tokenizer.decode_batch([ids])[0]

    def suffix(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        last_id: int,
        tools: Sequence[Message] = (),
        arguments: Arguments = None,
    ) -> list[int]:
        """Return the ids between the last sampled id and the first id of the next answer: the end of the
        model's turn, the new messages, and the assistant's header.

        The last answer is rendered as a marker, so its own text has no effect. What the template puts behind
        the marker is encoded. An end of turn that was sampled is not repeated.

        Args:
            before: the conversation so far, with the model's last answer at its end.
            last_id: the last id that was sampled.
            tools: tools of the conversation.
        Raises: ValueError if the chat template refuses the messages, or leaves out the last answer."""
        marker = _unused_marker(new)
        # without its tool calls, which a template may write behind the marker, or in its place
        answer = {name: value for name, value in before[-1].items() if name != "tool_calls"}
        text = self._render(before[:-1], [{**answer, "content": marker}, *new], tools, arguments)
        _, found, rest = text.rpartition(marker)
        if not found:
            raise ValueError("the chat template leaves out the model's last answer, so nothing can follow it")
        ids = self._tokenizer.encode_responses([rest])[0]
        end = next((at for at, index in enumerate(ids) if index in self._stop_ids), None)
        if end is None:  # a template without an end of turn
            return ids
        is_sampled = last_id == ids[end] or last_id in self._eos_ids
        return ids[end + 1 :] if is_sampled else ids[end:]

    def _render(self, before: Sequence[Message], rest: Sequence[Message], *given: Any) -> str:
        """Return the text of a conversation; what stands before `rest` may be shorter than it is.

        Some templates demand that users and the assistant alternate, answers with `tool_calls` excepted.
        Answers are kept as texts, calls included, so such a template refuses a second round of tools. It gets
        the last user's message, and what is before the first, alone."""
        try:
            return self._tokenizer.render([*before, *rest], *given)
        except ValueError:
            users = [at for at, message in enumerate(before) if message["role"] == "user"]
            short = [*before[: users[0]], before[users[-1]]] if users else []
            if not users or len(short) == len(before):
                raise
            return self._tokenizer.render([*short, *rest], *given)


def _unused_marker(messages: Sequence[Message]) -> str:
    """Return a marker text that occurs in none of the messages, so that its place in the rendered text can be
    found."""
    number, text = 0, json.dumps(list(messages), ensure_ascii=False, default=str)
    while _MARKER.format(number) in text:
        number += 1
    return _MARKER.format(number)

"""Define the interface that every tokenizer offers, and the part of it that all share."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Messages = Sequence[dict[str, Any]] | str
ChatTemplate = Callable[..., str]
"""Renders a list of messages; see `compile_template`."""
OPEN, CLOSE = "\U000f0001", "\U000f0002"
"""Characters of no text, around what a template's {% generation %} marks."""
MARK = "\u241fanswer\u241f"
"""A text in the place of an answer, to find what a chat template writes behind it."""


class Tokenizer(ABC):
    """The interface of every tokenizer: it encodes prompts and responses as token ids, and decodes ids.

    Ids hold nothing that the text does not ask for, except for the BOS rule of `encode_prompts`."""

    name: str
    """Path from which the tokenizer was loaded."""
    vocab_size: int
    """Largest id + 1, including added tokens."""
    eos_token_id: int
    pad_token_id: int
    """Id of the padding token, or the end-of-sequence id if there is no padding token."""
    bos: list[int]
    """The beginning-of-sequence id if the tokenizer starts its texts with one, else []."""
    template: ChatTemplate | None
    """Renders messages as text, up to and including the assistant's header."""
    template_arguments: Mapping[str, Any] = MappingProxyType({})
    """What the template reads besides messages and tools, by name: --chat-template-args."""
    special_tokens: Mapping[str, int]
    """Text -> id of the special tokens, such as <|im_end|>."""
    end_ids: Sequence[int] = ()
    """The model's own end-of-sequence ids."""

    @abstractmethod
    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each response. Nothing is added; the caller appends `eos_token_id`."""

    @abstractmethod
    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of token ids, without special tokens.

        Ids >= vocab_size are left out too. A model with a padded vocabulary can sample them."""

    def encode_prompts(
        self,
        prompts: Sequence[Messages],
        tools: Sequence[dict[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each prompt, which is a list of messages or a string.

        Messages go through the chat template. A string is encoded as it is, after the beginning-of-sequence
        token, unless the string has it already: a user may have rendered the template before.

        Args:
            tools: tools that the chat template shows to the model, in OpenAI's form.
            arguments: what else the template reads, over `template_arguments`."""
        texts = [self.render(prompt, tools, arguments) for prompt in prompts]
        return self.encode_rendered(texts, [isinstance(prompt, str) for prompt in prompts])

    def encode_rendered(self, texts: Sequence[str], are_raw: Sequence[bool]) -> list[list[int]]:
        """Return the token ids of rendered prompts. Those that are raw, not rendered, begin with the
        beginning-of-sequence token."""
        return [
            self.bos + ids if is_raw and ids[:1] != self.bos else ids
            for is_raw, ids in zip(are_raw, self.encode_responses(texts), strict=True)
        ]

    @functools.cached_property
    def turn_tail(self) -> str:
        """The text that the chat template writes behind an answer; "" without a template."""
        return self._behind_answer()

    @functools.cached_property
    def turn_end(self) -> int:
        """Id of the token that ends an answer: what the chat template writes behind one, or an
        end-of-sequence id of the model with which it begins the next turn, as GLM's; else the tokenizer's end
        of sequence."""
        following = self._behind_answer({"role": "user", "content": "?"})
        token = self.leading_token(self.turn_tail) or self.leading_token(following, self.end_ids)
        return self.eos_token_id if token is None else self.special_tokens[token]

    def leading_token(self, text: str, ids: Container[int] | None = None) -> str | None:
        """Return the special token, one of these ids, with which a text begins but for blanks; None without one."""
        text = text.lstrip()
        found = [
            one
            for one, index in self.special_tokens.items()
            if text.startswith(one) and (ids is None or index in ids)
        ]
        return max(found, key=len, default=None)

    def _behind_answer(self, *following: dict[str, Any]) -> str:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}, *following]
        try:
            _, found, rest = self.render(turns, is_answered=True).rpartition(MARK)
        except ValueError:  # no template, or one that refuses this conversation
            return ""
        return rest if found else ""

    def encode_prompt(self, prompt: Messages) -> list[int]:
        return self.encode_prompts([prompt])[0]

    def encode_response(self, text: str) -> list[int]:
        return self.encode_responses([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_batch([ids])[0]

    def render(
        self,
        messages: Messages,
        tools: Sequence[dict[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        is_answered: bool = False,
        is_tagged: bool = False,
    ) -> str:
        """Return the text that is encoded for a prompt: through the chat template, or the string as it is.

        Args:
            arguments: what the row has for the template, over `template_arguments`.
            is_answered: whether the messages end with an answer, so that no header for one follows.
            is_tagged: whether OPEN and CLOSE mark what the template's {% generation %} marks."""
        if isinstance(messages, str):
            return messages
        if self.template is None:
            raise ValueError(
                f"the tokenizer in {self.name} has no chat template, but the prompts are lists of messages. "
                "Put a chat_template.jinja into that folder, or make the prompt column a string."
            )
        given = {**self.template_arguments, **(arguments or {})}
        flags = {"add_generation_prompt": not is_answered, "tagged": is_tagged}
        try:
            return self.template(list(messages), **given | flags, **({"tools": list(tools)} if tools else {}))
        except Exception as error:  # a foreign template: its own error, or any error of the Python under it
            raise ValueError(
                f"the chat template in {self.name} refuses the prompt {list(messages)!r:.500}: "
                f"{type(error).__name__}: {error}"
            ) from error

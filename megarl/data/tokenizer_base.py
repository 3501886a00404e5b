"""Define the interface that every tokenizer offers, and the part of it that all share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

Messages = Sequence[dict[str, Any]] | str
ChatTemplate = Callable[..., str]
"""Renders a list of messages, and tools=... in OpenAI's form if there are some."""


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

    @abstractmethod
    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each response. Nothing is added; the caller appends `eos_token_id`."""

    @abstractmethod
    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of token ids, without special tokens.

        Ids >= vocab_size are left out too. A model with a padded vocabulary can sample them."""

    def encode_prompts(
        self, prompts: Sequence[Messages], tools: Sequence[dict[str, Any]] = ()
    ) -> list[list[int]]:
        """Return the token ids of each prompt, which is a list of messages or a string.

        Messages go through the chat template. A string is encoded as it is, after the beginning-of-sequence
        token, unless the string has it already: a user may have rendered the template before.

        Args:
            tools: tools that the chat template shows to the model, in OpenAI's form."""
        texts = [self.render(prompt, tools) for prompt in prompts]
        return [
            self.bos + ids if isinstance(prompt, str) and ids[:1] != self.bos else ids
            for prompt, ids in zip(prompts, self.encode_responses(texts), strict=True)
        ]

    def encode_prompt(self, prompt: Messages) -> list[int]:
        return self.encode_prompts([prompt])[0]

    def encode_response(self, text: str) -> list[int]:
        return self.encode_responses([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_batch([ids])[0]

    def render(self, messages: Messages, tools: Sequence[dict[str, Any]] = ()) -> str:
        """Return the text that is encoded for a prompt: through the chat template, or the string as it is."""
        if isinstance(messages, str):
            return messages
        if self.template is None:
            raise ValueError(
                f"the tokenizer in {self.name} has no chat template, but the prompts are lists of messages. "
                "Put a chat_template.jinja into that folder, or make the prompt column a string."
            )
        try:
            given = {"tools": list(tools)} if tools else {}
            return self.template(list(messages), **given)
        except Exception as error:  # a foreign template: its own error, or any error of the Python under it
            raise ValueError(
                f"the chat template in {self.name} refuses the prompt {list(messages)!r:.500}: "
                f"{type(error).__name__}: {error}"
            ) from error

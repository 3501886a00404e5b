"""Define the interface that every tokenizer offers, whatever library is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Messages = Sequence[dict[str, Any]] | str


class Tokenizer(Protocol):
    """The interface of a tokenizer. Ids never hold anything the text does not ask for, but for the BOS rule
    below."""

    name: str
    """The path that it was loaded from."""
    vocab_size: int
    """Largest id + 1, added tokens included."""
    eos_token_id: int
    pad_token_id: int
    """The end-of-sequence id if the tokenizer has no padding token."""

    def encode_prompt(self, prompt: Messages) -> list[int]:
        """Return the ids of a prompt.

        Messages go through the chat template, up to and including the assistant's header. A string is encoded
        as it is, after the beginning-of-sequence token if the tokenizer starts its texts with one."""
        ...

    def encode_prompts(self, prompts: Sequence[Messages]) -> list[list[int]]:
        """Encode many prompts at once, which is faster."""
        ...

    def encode_response(self, text: str) -> list[int]:
        """Return the ids of a response. Nothing is added; the caller appends `eos_token_id`."""
        ...

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many responses at once, which is faster."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Special tokens are left out, and ids >= vocab_size, which a model with a
        padded vocabulary can sample."""
        ...

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Decode many sequences at once, which is faster."""
        ...

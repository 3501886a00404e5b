"""Define the interface that every tokenizer offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Messages = Sequence[dict[str, Any]] | str


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Ids hold nothing that the text does not ask for, except for the BOS rule of `encode_prompt`."""

    name: str
    """Path from which the tokenizer was loaded."""
    vocab_size: int
    """Largest id + 1, including added tokens."""
    eos_token_id: int
    pad_token_id: int
    """Id of the padding token, or the end-of-sequence id if there is no padding token."""

    def encode_prompt(self, prompt: Messages) -> list[int]:
        """Return the ids of a prompt.

        Messages go through the chat template, up to and including the assistant's header. A string is encoded
        as it is. The beginning-of-sequence token is put before the string if the tokenizer starts its texts
        with one."""
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
        """Return the text of ids, without special tokens.

        Ids >= vocab_size are left out too. A model with a padded vocabulary can sample them."""
        ...

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Decode many sequences at once, which is faster."""
        ...

"""Put a SentencePiece *.model file behind the interface of tokenizer_base.py.

Such a file has no chat template. A `chat_template.jinja` in the same folder is used if present (Hugging
Face's conventions: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception`).
Otherwise messages become plain text, one line each,

    user: 23-5-1 ?
    assistant:

after the beginning-of-sequence token, if the file defines one. Control pieces (<s>, </s>, ...) in a template
or a text become their ids. SentencePiece encodes each stretch between them separately, with its normalization
and dummy prefix.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from megarl.data.chat_template import compile_template
from megarl.data.tokenizer_base import Messages

DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% "
    "endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

logger = logging.getLogger(__name__)


class SentencePieceTokenizer:
    """A tokenizer with SentencePiece's own ids, unchanged."""

    def __init__(self, path: str, flag: str = "--tokenizer-model"):
        import sentencepiece

        self.name = path
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.Load(path)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{flag} ({path}) is not a SentencePiece model: {error}") from error
        self.vocab_size: int = self._processor.vocab_size()
        self.eos_token_id: int = self._processor.eos_id()
        if self.eos_token_id < 0:
            raise ValueError(
                f"{flag} ({path}) has no end-of-sequence piece (eos_id is -1). Train the model with one."
            )
        pad = self._processor.pad_id()
        self.pad_token_id: int = self.eos_token_id if pad < 0 else pad
        bos = self._processor.bos_id()
        self._bos: list[int] = [] if bos < 0 else [bos]
        self._control_ids = {
            self._processor.id_to_piece(i): i for i in range(self.vocab_size) if self._processor.is_control(i)
        }
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._template = _load_template(os.path.join(os.path.dirname(path), "chat_template.jinja"))
        self._template_variables = {
            "bos_token": self._processor.id_to_piece(bos) if self._bos else "",
            "eos_token": self._processor.id_to_piece(self.eos_token_id),
            "add_generation_prompt": True,
        }
        if self.decode(self.encode_response("1\n2")) != "1\n2":
            logger.warning(
                "%s loses line breaks: prompts and responses of several lines become one line", path
            )

    def encode_prompt(self, prompt: Messages) -> list[int]:
        ids = self.encode_response(prompt if isinstance(prompt, str) else self._render(prompt))
        return self._bos + ids if isinstance(prompt, str) and ids[:1] != self._bos else ids

    def encode_prompts(self, prompts: Sequence[Messages]) -> list[list[int]]:
        return [self.encode_prompt(prompt) for prompt in prompts]

    def encode_response(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._control_pattern.split(text):
            if part in self._control_ids:
                ids.append(self._control_ids[part])
            elif part:
                ids += self._processor.encode(part)
        return ids

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_response(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(i) for i in ids if i < self.vocab_size])

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in sequences]

    def _render(self, messages: Messages) -> str:
        try:
            return self._template.render(messages=list(messages), **self._template_variables)
        except Exception as error:  # a foreign template: its own error, or any error of the Python under it
            shown = f"{list(messages)!r:.500}"
            raise ValueError(
                f"the chat template beside {self.name} refuses the prompt {shown}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _load_template(path: str) -> Any:
    """Return the jinja2.Template of the file, or the default one."""
    source = DEFAULT_CHAT_TEMPLATE
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            source = file.read()
    return compile_template(source, path)

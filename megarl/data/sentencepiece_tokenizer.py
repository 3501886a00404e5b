"""Put a SentencePiece *.model file behind the interface `Tokenizer` of tokenizer_base.py.

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

from megarl.data.chat_template import compile_template, read_text
from megarl.data.tokenizer_base import Tokenizer

DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% "
    "endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

logger = logging.getLogger(__name__)


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer with SentencePiece's own ids, unchanged."""

    def __init__(self, path: str, flag: str = "--tokenizer-model"):
        import sentencepiece

        self.name = path
        self._pieces = pieces = sentencepiece.SentencePieceProcessor()
        try:
            pieces.Load(path)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{flag} ({path}) is not a SentencePiece model: {error}") from error
        self.vocab_size, self.eos_token_id, bos = pieces.vocab_size(), pieces.eos_id(), pieces.bos_id()
        if self.eos_token_id < 0:
            raise ValueError(
                f"{flag} ({path}) has no end-of-sequence piece (eos_id is -1). Train the model with one."
            )
        self.pad_token_id = self.eos_token_id if pieces.pad_id() < 0 else pieces.pad_id()
        self.bos = [] if bos < 0 else [bos]
        self.special_tokens = {
            pieces.id_to_piece(i): i for i in range(self.vocab_size) if pieces.is_control(i)
        }
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        file = os.path.join(os.path.dirname(path), "chat_template.jinja")
        source = read_text(file)
        self.template = compile_template(
            DEFAULT_CHAT_TEMPLATE if source is None else source,
            file,
            bos_token=pieces.id_to_piece(bos) if self.bos else "",
            eos_token=pieces.id_to_piece(self.eos_token_id),
        )
        if self.decode(self.encode_response("1\n2")) != "1\n2":
            logger.warning(
                "%s loses line breaks: prompts and responses of several lines become one line", path
            )

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        return list(map(self._encode, texts))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._control_pattern.split(text):
            if part in self.special_tokens:
                ids.append(self.special_tokens[part])
            elif part:
                ids += self._pieces.encode(part)
        return ids

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [self._pieces.decode([int(i) for i in ids if i < self.vocab_size]) for ids in sequences]

"""Read a Hugging Face tokenizer folder without transformers.

The import of transformers takes longer than `megarl check` may take. This module is for looks at a few rows
before a job starts. Training reads the folder with transformers itself (hf_tokenizer.py)."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

from megarl.data.chat_template import compile_template, read_text
from megarl.data.tokenizer import load_tokenizer
from megarl.data.tokenizer_base import ChatTemplate, Tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_quickly(path: str | os.PathLike[str], flag: str = "--tokenizer-model") -> Tokenizer | None:
    """Load a tokenizer as `load_tokenizer` does; None for a folder that only transformers can read.

    Such a folder has no tokenizer.json.

    Raises: ValueError as `load_tokenizer`, or for a malformed tokenizer.json."""
    return load_tokenizer(path, flag, _load_folder)


def _load_folder(path: str, flag: str) -> Tokenizer | None:
    return QuickTokenizer(path, flag) if os.path.isfile(os.path.join(path, "tokenizer.json")) else None


class QuickTokenizer(Tokenizer):
    """A tokenizer.json, read by the library that made it.

    The special tokens and the chat template are those that transformers would find."""

    def __init__(self, path: str, flag: str):
        import tokenizers

        self.name = path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(os.path.join(path, "tokenizer.json"))
        except Exception as error:  # Rust raises a bare Exception
            raise ValueError(f"{flag} ({path}): tokenizer.json is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = config = _read_object(os.path.join(path, "tokenizer_config.json"), flag)
        special = config | _read_object(os.path.join(path, "special_tokens_map.json"), flag)
        self._special = {name: text for name in _SPECIAL if (text := _content(special.get(name))) is not None}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = config.get("added_tokens_decoder") or {}
        if not isinstance(added, dict) or not all(index.isdecimal() for index in added):
            raise ValueError(
                f"{flag} ({path}): added_tokens_decoder in its tokenizer_config.json must be an "
                "object of token ids."
            )
        later = {_content(token): int(index) for index, token in added.items()}
        self.vocab_size = max([*vocabulary.values(), *later.values()], default=-1) + 1
        eos = self._special.get("eos_token")
        if eos is None:
            raise ValueError(
                f'{flag} ({path}): the tokenizer has no end-of-sequence token. Set "eos_token" in '
                "its tokenizer_config.json."
            )
        if (index := vocabulary.get(eos, later.get(eos))) is None:
            raise ValueError(
                f"{flag} ({path}): the end-of-sequence token {eos!r} is not in the vocabulary. "
                'Correct "eos_token" in its tokenizer_config.json.'
            )
        self.eos_token_id = index
        self.pad_token_id = vocabulary.get(self._special.get("pad_token", ""), index)
        first = self._tokenizer.encode("").ids[:1]
        self.bos = first if first == [vocabulary.get(self._special.get("bos_token", ""))] else []

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        source = read_text(os.path.join(self.name, "chat_template.jinja"))
        if source is None:
            source = self._config.get("chat_template")
        if isinstance(source, list):  # several templates, by name
            named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        return compile_template(source, f"the chat template in {self.name}", **self._special)

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        known = [[index for index in ids if index < self.vocab_size] for ids in sequences]
        return [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in known]


def _read_object(path: str, flag: str) -> dict[str, Any]:
    """Read a JSON object from a file. Returns {} if there is no such file."""
    folder, name = os.path.split(path)
    try:
        text = read_text(path)
        value = {} if text is None else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
        raise ValueError(f"{flag} ({folder}): {name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{flag} ({folder}): {name} must hold a JSON object.")
    return value


def _content(token: object) -> str | None:
    """Return the text of a special token, which is written as a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None

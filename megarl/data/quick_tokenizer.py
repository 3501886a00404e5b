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

_ENDOFTEXT = "<|endoftext|>"
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN2_BY_DEFAULT = ("qwen2_moe", "qwen3", "qwen3_moe")
"""Models whose tokenizer is a Qwen2Tokenizer if tokenizer_config.json names no class."""
_WITHOUT_CLASS = ("deepseek_v2", "deepseek_v3", "mistral", "mixtral")
"""Models for which transformers ignores the class that tokenizer_config.json names."""


def load_quickly(path: str | os.PathLike[str], flag: str = "--tokenizer-model") -> Tokenizer | None:
    """Load a tokenizer as `load_tokenizer` does; None for a folder that only transformers can read.

    Such a folder has no tokenizer.json.

    Raises: ValueError as `load_tokenizer`, or for a malformed tokenizer.json."""
    return load_tokenizer(path, flag, _load_folder)


def _load_folder(path: str, flag: str) -> Tokenizer | None:
    return QuickTokenizer(path, flag) if os.path.isfile(os.path.join(path, "tokenizer.json")) else None


class QuickTokenizer(Tokenizer):
    """A tokenizer that reads tokenizer.json with the library tokenizers, without transformers.

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
        given = config | _read_object(os.path.join(path, "special_tokens_map.json"), flag)
        special = given
        if _is_qwen2(config, _read_object(os.path.join(path, "config.json"), flag)):
            special = {"unk_token": _ENDOFTEXT, "eos_token": _ENDOFTEXT, "pad_token": _ENDOFTEXT} | given
        self._special = {name: text for name in _SPECIAL if (text := _content(special.get(name))) is not None}
        later = _added_tokens(config, f"{flag} ({path})")
        known = {*self._tokenizer.get_vocab(with_added_tokens=True), *later}
        eos = self._special.get("eos_token")
        if eos is None:
            raise ValueError(
                f'{flag} ({path}): the tokenizer has no end-of-sequence token. Set "eos_token" in '
                "its tokenizer_config.json."
            )
        if eos not in known and "eos_token" in given:
            raise ValueError(
                f"{flag} ({path}): the end-of-sequence token {eos!r} is not in the vocabulary. "
                'Correct "eos_token" in its tokenizer_config.json.'
            )
        # transformers adds other special tokens that the vocabulary lacks
        added = [text for text in dict.fromkeys(self._special.values()) if text not in known]
        self._tokenizer.add_special_tokens(added)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max([*vocabulary.values(), *later.values()], default=-1) + 1
        self.eos_token_id = index = vocabulary.get(eos, later.get(eos))
        self.pad_token_id = vocabulary.get(self._special.get("pad_token", ""), index)
        first = self._tokenizer.encode("").ids[:1]
        self.bos = first if first == [vocabulary.get(self._special.get("bos_token", ""))] else []

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        source = read_text(os.path.join(self.name, "chat_template.jinja"))
        if source is None:
            source = self._config.get("chat_template")
        if isinstance(source, list):  # several templates, by name
            source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        if not isinstance(source, str) and not isinstance(source, dict):
            return None
        return compile_template(source, f"the chat template in {self.name}", **self._special)

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        named = {*self._special.values()}
        return {
            token.content: index for index, token in added.items() if token.special or token.content in named
        }

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        known = [[index for index in ids if index < self.vocab_size] for ids in sequences]
        return [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in known]


def _added_tokens(config: dict[str, Any], where: str) -> dict[str | None, int]:
    """Return token -> id of the tokens that tokenizer_config.json adds. Raises: ValueError if they are
    malformed."""
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(index.isdecimal() for index in added):
        raise ValueError(
            f"{where}: added_tokens_decoder in its tokenizer_config.json must be an object of token ids."
        )
    return {_content(token): int(index) for index, token in added.items()}


def _is_qwen2(config: dict[str, Any], model: dict[str, Any]) -> bool:
    """Return whether transformers makes a Qwen2Tokenizer of a folder. That class adds <|endoftext|> to the
    vocabulary if it is not there.

    Args:
        config: content of tokenizer_config.json.
        model: content of config.json; {} if the folder has none."""
    name, model_type = config.get("tokenizer_class"), model.get("model_type")
    if model_type == "qwen2":
        return True
    if name is None:
        return model_type in _QWEN2_BY_DEFAULT
    return name in _QWEN2_CLASSES and model_type not in _WITHOUT_CLASS


def _read_object(path: str, flag: str) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no such file. Raises: ValueError if it is not JSON."""
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
    """Return the text of a special token, which is written as a string or an object; None for any other
    value."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None

"""Read a Hugging Face tokenizer folder without transformers.

The import of transformers takes longer than `megarl check` may take. This module is for looks at a few rows
before a job starts. Training reads the folder with transformers itself (hf_tokenizer.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from megarl.data.chat_template import compile_template
from megarl.data.tokenizer import load_tokenizer
from megarl.data.tokenizer_base import Messages, Tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_quickly(path: str | os.PathLike[str], flag: str = "--tokenizer-model") -> Tokenizer | None:
    """Load a tokenizer as `load_tokenizer` does; None for a folder that only transformers can read.

    Such a folder has no tokenizer.json.

    Raises: ValueError as `load_tokenizer`, or for a malformed tokenizer.json."""
    path = os.fspath(path)
    if os.path.isfile(os.path.join(path, "tokenizer.json")):
        return QuickTokenizer(path, flag)
    files = set(os.listdir(path)) if os.path.isdir(path) else set()
    needs_transformers = files and any(
        name.startswith(("tokenizer_config", "vocab", "spiece")) or name.endswith(".tiktoken")
        for name in files
    )
    return None if needs_transformers else load_tokenizer(path, flag)


class QuickTokenizer:
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
        config = _read_object(os.path.join(path, "tokenizer_config.json"), flag)
        special = {**config, **_read_object(os.path.join(path, "special_tokens_map.json"), flag)}
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
        self.eos_token_id: int = index
        self.pad_token_id: int = vocabulary.get(self._special.get("pad_token", ""), index)
        first = self._tokenizer.encode("").ids[:1]
        self._bos: list[int] = (
            first if first and first == [vocabulary.get(self._special.get("bos_token", ""))] else []
        )
        self._template_source = _template_source(path, config)
        self._template: Any = None

    def encode_prompt(self, prompt: Messages) -> list[int]:
        ids = self.encode_response(prompt if isinstance(prompt, str) else self._render(prompt))
        return self._bos + ids if isinstance(prompt, str) and self._bos and ids[:1] != self._bos else ids

    def encode_prompts(self, prompts: Sequence[Messages]) -> list[list[int]]:
        return [self.encode_prompt(prompt) for prompt in prompts]

    def encode_response(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_response(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            [index for index in ids if index < self.vocab_size], skip_special_tokens=True
        )

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in sequences]

    def _render(self, messages: Messages) -> str:
        if self._template_source is None:
            raise ValueError(
                f"the tokenizer in {self.name} has no chat template, but the prompts are lists of messages. "
                "Put a chat_template.jinja into that folder, or make the prompt column a string."
            )
        if self._template is None:
            self._template = compile_template(self._template_source, f"the chat template in {self.name}")
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except Exception as error:  # a foreign template: its own error, or any error of the Python under it
            shown = f"{list(messages)!r:.500}"
            raise ValueError(
                f"the chat template in {self.name} refuses the prompt {shown}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _read_object(path: str, flag: str) -> dict[str, Any]:
    """Read a JSON object from a file. Returns {} if there is no such file."""
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
        raise ValueError(
            f"{flag} ({os.path.dirname(path)}): {os.path.basename(path)} is not JSON: {error}"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{flag} ({os.path.dirname(path)}): {os.path.basename(path)} must hold a JSON object."
        )
    return value


def _content(token: object) -> str | None:
    """Return the text of a special token, which is written as a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_source(path: str, config: dict[str, Any]) -> str | None:
    file = os.path.join(path, "chat_template.jinja")
    if os.path.isfile(file):
        with open(file, encoding="utf-8") as text:
            return text.read()
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}.get(
            "default"
        )
    return template if isinstance(template, str) else None

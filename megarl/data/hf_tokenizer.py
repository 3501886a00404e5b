"""Put a Hugging Face tokenizer folder behind the interface `Tokenizer` of tokenizer_base.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megarl.data.chat_template import compile_template
from megarl.data.tokenizer_base import ChatTemplate, Tokenizer


class HFTokenizer(Tokenizer):
    """A tokenizer of transformers, which renders chat templates and makes ids as the model knows them.

    Special tokens in a text ("<|im_end|>") become special ids, as everywhere in transformers.
    """

    def __init__(self, path: str, flag: str = "--tokenizer-model"):
        from transformers import AutoTokenizer

        self.name = path
        try:
            self.hugging_face = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )  # None would make transformers ask on the terminal
        # a foreign library on a foreign file: anything from KeyError to a bare Exception out of Rust
        except Exception as error:
            raise ValueError(
                f"{flag} ({path}): transformers cannot load this tokenizer: {type(error).__name__}: {error}"
            ) from error
        if not self.encode_response("1+1"):
            raise ValueError(
                f"{flag} ({path}): the tokenizer has no vocabulary. Is tokenizer.json (or "
                "vocab.json, tokenizer.model) there?"
            )
        if self.hugging_face.eos_token_id is None:
            raise ValueError(
                f'{flag} ({path}): the tokenizer has no end-of-sequence token. Set "eos_token" in '
                "its tokenizer_config.json."
            )
        self.eos_token_id = self.hugging_face.eos_token_id
        pad = self.hugging_face.pad_token_id
        self.pad_token_id = self.eos_token_id if pad is None else pad
        self.vocab_size = max(self.hugging_face.get_vocab().values()) + 1
        first = self.hugging_face("")["input_ids"][:1]
        self.bos = first if first == [self.hugging_face.bos_token_id] else []

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        source, special = self.hugging_face.chat_template, self.hugging_face.special_tokens_map
        return source and compile_template(source, f"the chat template in {self.name}", **special)

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        added = self.hugging_face.added_tokens_decoder
        return {str(token): index for index, token in added.items() if token.special}

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:  # transformers would return no list of lists
            return []
        return self.hugging_face(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        # Clean-up would turn a model's " ." into ".", and the reward would judge another text.
        return self.hugging_face.batch_decode(
            sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

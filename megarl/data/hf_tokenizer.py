"""Put a Hugging Face tokenizer folder behind the interface of tokenizer_base.py."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.tokenizer_base import Messages


class HFTokenizer:
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
        if not self._ids(["1+1"])[0]:
            raise ValueError(
                f"{flag} ({path}): the tokenizer has no vocabulary. Is tokenizer.json (or "
                "vocab.json, tokenizer.model) there?"
            )
        if self.hugging_face.eos_token_id is None:
            raise ValueError(
                f'{flag} ({path}): the tokenizer has no end-of-sequence token. Set "eos_token" in '
                "its tokenizer_config.json."
            )
        self.eos_token_id: int = self.hugging_face.eos_token_id
        pad = self.hugging_face.pad_token_id
        self.pad_token_id: int = self.eos_token_id if pad is None else pad
        self.vocab_size = max(self.hugging_face.get_vocab().values()) + 1
        bos, around_nothing = self.hugging_face.bos_token_id, self.hugging_face("")["input_ids"]
        self._bos: list[int] = around_nothing[:1] if bos is not None and around_nothing[:1] == [bos] else []

    def encode_prompt(self, prompt: Messages) -> list[int]:
        return self.encode_prompts([prompt])[0]

    def encode_prompts(self, prompts: Sequence[Messages]) -> list[list[int]]:
        all_ids = self._ids(
            [prompt if isinstance(prompt, str) else self._render(prompt) for prompt in prompts]
        )
        for position, prompt in enumerate(prompts):
            # A user may have rendered the template himself, with its BOS token in the text: two of them would
            # A user may have rendered the template already, with its BOS token in the text. A second one
            # would be wrong.
            if isinstance(prompt, str) and self._bos and all_ids[position][:1] != self._bos:
                all_ids[position] = self._bos + all_ids[position]
        return all_ids

    def encode_response(self, text: str) -> list[int]:
        return self._ids([text])[0]

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        return self._ids(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_batch([ids])[0]

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        # Clean-up would turn a model's " ." into ".", and the reward would judge another text.
        return self.hugging_face.batch_decode(
            sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.hugging_face(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def _render(self, messages: Messages) -> str:
        if self.hugging_face.chat_template is None:
            raise ValueError(
                f"the tokenizer in {self.name} has no chat template, but the prompts are lists of messages. "
                "Put a chat_template.jinja into that folder, or make the prompt column a string."
            )
        try:
            return self.hugging_face.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a foreign template: its own error, or any error of the Python under it
            shown = f"{list(messages)!r:.500}"
            raise ValueError(
                f"the chat template in {self.name} refuses the prompt {shown}: "
                f"{type(error).__name__}: {error}"
            ) from error

"""A Hugging Face sequence classifier with one label as a reward model. The only module of this package
that needs torch: only the rank that runs the model imports it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from megarl.rewards.judge_prompt import Messages, conversation_text


class Classifier:
    """A frozen sequence classifier, whole on this process's device, that scores sequences of token ids
    (`scores`)."""

    def __init__(self, path: str) -> None:
        """Load config, *.safetensors and tokenizer of a folder; no code from it is run. The weights keep the
        dtype they were saved in.

        Raises: ValueError naming the folder if transformers cannot load it, it has not one label, or weights
        are missing."""
        from transformers import AutoModelForSequenceClassification
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # of reading tensors, one bar per rank
        self.path, self.device = path, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype="auto",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # a foreign library on a foreign folder
            raise ValueError(
                f"--reward-model ({path}): transformers cannot load it: {type(error).__name__}: {error}"
            ) from error
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(
                f"--reward-model ({path}): the folder has no weights for {', '.join(missing[:3])}, "
                "which would be random. Give "
                "a trained classifier, or --reward-model-backend judge for a language model."
            )
        if model.config.num_labels != 1:
            raise ValueError(
                f"--reward-model ({path}): must have one label, its score, and has {model.config.num_labels}."
            )
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.chunks = [self.model]  # as Megatron's models have them; what is offloaded
        self.tokenizer = load_tokenizer(path)
        text = model.config.get_text_config()
        limits = (
            getattr(text, "max_position_embeddings", None),
            getattr(self.tokenizer, "model_max_length", None),
        )
        self.max_length = min(
            (limit for limit in limits if isinstance(limit, int) and limit > 0), default=2**62
        )
        """Number of tokens that the model can take."""

    @torch.inference_mode()
    def scores(self, sequences: Sequence[Sequence[int]], max_tokens: int) -> list[float | None]:
        """Return the model's score of each sequence of token ids, in order; None for a sequence that is too
        long, or a score that is not finite.

        max_tokens: of one forward pass, padding included (a longer sequence gets a pass of its own)."""
        out: list[float | None] = [None] * len(sequences)
        fits = [index for index, ids in enumerate(sequences) if 0 < len(ids) <= self.max_length]
        for rows in batches_of_like_length({index: len(sequences[index]) for index in fits}, max_tokens):
            for index, score in zip(rows, self._forward([sequences[index] for index in rows]), strict=True):
                out[index] = score if math.isfinite(score) else None
        return out

    def _forward(self, sequences: list[Sequence[int]]) -> list[float]:
        width, text = max(map(len, sequences)), self.model.config.get_text_config()
        # Decoders are scored at the last token that is not padding, and recognize padding by its id. Where the
        # folder sets none, any unused id will do, because padding is on the right and masked.
        pad = text.pad_token_id
        if pad is None:
            held = {token for ids in sequences for token in ids}
            pad = next(token for token in range(text.vocab_size) if token not in held)
        tokens = torch.full((len(sequences), width), pad)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = torch.tensor(ids)
        lengths = torch.tensor([len(ids) for ids in sequences])
        mask = (torch.arange(width) < lengths[:, None]).long()
        before, text.pad_token_id = text.pad_token_id, pad
        try:
            logits = self.model(input_ids=tokens.to(self.device), attention_mask=mask.to(self.device)).logits
        finally:
            text.pad_token_id = before
        return logits[:, 0].float().tolist()


def load_tokenizer(path: str):
    """Return a reward model's own tokenizer. Raises: ValueError naming the folder if transformers cannot load
    it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a foreign library on a foreign folder
        raise ValueError(
            f"--reward-model ({path}): transformers cannot load its tokenizer: "
            f"{type(error).__name__}: {error}"
        ) from error


def encode_pair(tokenizer, prompt: Messages, response: str) -> list[int]:
    """Return the token ids of a prompt and its response as a pair of texts, with the special tokens that the
    tokenizer of an encoder puts around those."""
    return tokenizer(conversation_text(prompt), response, verbose=False)["input_ids"]


def batches_of_like_length(lengths: Mapping[int, int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the keys of `lengths` in batches, longest first: padded to its longest, a batch has at most
    max_tokens tokens, and little of it is padding. A length above max_tokens is a batch of its own."""
    group: list[int] = []
    for key in sorted(lengths, key=lambda key: (-lengths[key], key)):
        if group and (len(group) + 1) * lengths[group[0]] > max_tokens:
            yield group
            group = []
        group.append(key)
    if group:
        yield group

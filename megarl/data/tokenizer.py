"""Load a tokenizer, from a Hugging Face folder or a SentencePiece file, behind one interface."""

from __future__ import annotations

import os
from collections.abc import Callable

from megarl.data.tokenizer_base import Tokenizer


def load_tokenizer(
    path: str | os.PathLike[str],
    flag: str = "--tokenizer-model",
    load_folder: Callable[[str, str], Tokenizer | None] | None = None,
) -> Tokenizer | None:
    """Load a folder with a Hugging Face tokenizer, or a SentencePiece *.model file (also alone in a folder).

    Args:
        load_folder: reads a Hugging Face folder. Default: transformers.
    Raises: ValueError if there is no tokenizer at `path`, or it has no end-of-sequence token.
    """
    path = os.fspath(path)
    wanted = (
        "Give a folder with a Hugging Face tokenizer (tokenizer.json, ...) or a SentencePiece *.model file."
    )
    if not os.path.exists(path):
        raise ValueError(f"{flag} ({path}) does not exist. {wanted}")
    files = set(os.listdir(path)) if os.path.isdir(path) else set()
    if "tokenizer.model" in files and not files & {"tokenizer.json", "tokenizer_config.json", "config.json"}:
        path = os.path.join(path, "tokenizer.model")
    if os.path.isfile(path):
        if not path.endswith(".model"):
            raise ValueError(f"{flag} ({path}) is a file, but not a *.model file. {wanted}")
        from megarl.data.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(path, flag)
    # For a folder that has only a config.json, transformers returns an empty tokenizer instead of an error.
    if not any(
        name.startswith(("tokenizer", "vocab", "spiece")) or name.endswith((".model", ".tiktoken"))
        for name in files
    ):
        raise ValueError(f"{flag} ({path}) holds no tokenizer files. {wanted}")
    if load_folder is None:
        from megarl.data.hf_tokenizer import HFTokenizer as load_folder

    return load_folder(path, flag)


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int, model: str) -> None:
    """Check that every id of the tokenizer has a row in the model's embedding.

    More rows than ids are normal (padding).

    Args:
        model: the model's folder, for the error.
    Raises: ValueError naming both sizes.
    """
    if tokenizer.vocab_size > model_vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1} ({tokenizer.name}), but the model's "
            f"vocab_size is {model_vocab_size} ({os.path.join(model, 'config.json')}), so it has no "
            f"embedding for {tokenizer.vocab_size - model_vocab_size} of them. Give --tokenizer-model the "
            "tokenizer the model was trained with."
        )

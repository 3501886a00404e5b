"""Load a tokenizer, from a Hugging Face folder or a SentencePiece file, behind one interface."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.hf_config import ModelShape
from megarl.config.reward_models import read_model_config
from megarl.data.tokenizer_base import Tokenizer
from megarl.files.writing import writing

if TYPE_CHECKING:
    from megarl.config.schema import ModelConfig


def load_tokenizer(
    path: str | os.PathLike[str],
    flag: str = "--tokenizer-model",
    load_folder: Callable[[str, str], Tokenizer | None] | None = None,
) -> Tokenizer | None:
    """Return the tokenizer in a Hugging Face folder, or in a SentencePiece *.model file (also alone in a
    folder); None if `load_folder` returns None.

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


def tokenizer_of(
    model: ModelConfig, load: Callable[[str, str], Tokenizer | None] = load_tokenizer
) -> Tokenizer | None:
    """Return the tokenizer of a job, which gives its chat template what --chat-template-args says; None if
    `load` returns None.

    Raises: ValueError as `load_tokenizer`; ConfigError for a model whose config.json cannot be used."""
    flag = "--tokenizer-model" if model.tokenizer_model else "--model"
    tokenizer = load(model.tokenizer_model or model.model, flag)
    if tokenizer is not None:
        tokenizer.template_arguments = model.chat_template_args
        tokenizer.end_ids = ModelShape.load(model.model).eos_token_ids
    return tokenizer


def pad_of(model: str, tokenizer: Tokenizer) -> int:
    """Return the id of padding of a reward model that is trained from this folder: that of its config.json,
    else the tokenizer's, with which it is exported."""
    pad = read_model_config(model).get("pad_token_id")
    return tokenizer.pad_token_id if pad is None else pad


def complete_export(folder: Path, model: ModelConfig, is_classifier: bool) -> None:
    """Write what a job's tokenizer means for an exported model: the token that ends a turn into the
    end-of-sequence ids of its generation_config.json, and for a classifier the id of padding into its
    config.json."""
    tokenizer = tokenizer_of(model)
    assert tokenizer is not None
    changes: list[tuple[str, str, object]] = []
    if tokenizer.turn_end not in tokenizer.end_ids:
        changes.append(("generation_config.json", "eos_token_id", [*tokenizer.end_ids, tokenizer.turn_end]))
    if is_classifier:
        changes.append(("config.json", "pad_token_id", pad_of(model.model, tokenizer)))
    for file, name, value in changes:
        path = folder / file
        content = json.loads(path.read_text()) if path.exists() else {}
        with writing(path):
            path.write_text(json.dumps(content | {name: value}, indent=2) + "\n")


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int, model: str) -> None:
    """Raise ValueError if an id of the tokenizer has no row in the model's embedding.

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

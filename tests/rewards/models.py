"""Tiny reward models with random weights, and their scores by transformers alone: one sample at a time, so
without padding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, PreTrainedModel, Qwen2Config

from sums.model import EOS_ID, PAD_ID, write_model_folder

_SIZES = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)
CONFIGS = {
    "qwen2": Qwen2Config(num_key_value_heads=2, num_labels=1, pad_token_id=PAD_ID, **_SIZES),
    "padded with its end": Qwen2Config(num_key_value_heads=2, num_labels=1, pad_token_id=EOS_ID, **_SIZES),
    "no padding token": Qwen2Config(num_key_value_heads=2, num_labels=1, pad_token_id=None, **_SIZES),
    "bert": BertConfig(num_labels=1, pad_token_id=PAD_ID, **_SIZES),
}


def write_actor(folder: Path) -> Path:
    """The quickstart's model and tokenizer."""
    write_model_folder(str(folder), 0)
    return folder


def write_classifier(
    folder: Path, name: str, actor: Path, chat_template: str | None = None
) -> PreTrainedModel:
    """A classifier with the actor's tokenizer, and its own chat template if one is given. Weights far from
    zero: scores spread by 1."""
    torch.manual_seed(1)
    config = CONFIGS[name]
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.2) if parameter.dim() == 1 else parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(actor / file, folder / file)
    if chat_template is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": chat_template}))
    return model


@torch.no_grad()
def reference_scores(model: PreTrainedModel, sequences: list[list[int]]) -> list[float]:
    """Of each sequence's last token (decoders)."""
    before, model.config.pad_token_id = (
        model.config.pad_token_id,
        None,
    )  # then transformers scores the last token, whatever it is
    try:
        return [model(input_ids=torch.tensor([ids])).logits.item() for ids in sequences]
    finally:
        model.config.pad_token_id = before

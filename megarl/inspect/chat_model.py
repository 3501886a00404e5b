"""Load a model with transformers, and sample its answers, which are written to stdout while they grow."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.algorithms import samples
from megarl.config.args_file import numbered
from megarl.config.errors import ConfigError
from megarl.data.tokenizer import Tokenizer
from megarl.files.checkpoints import run_of_model
from megarl.inspect.runs import actor_argument_of, argument_of
from megarl.inspect.terminal import encodable, visible

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MAX_TOKENS = 1024
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes for a character of which only the first bytes are there."""


def load_model(
    folder: Path, arguments: argparse.Namespace, tokenizer: Tokenizer, name: str, number: int = 1
) -> PreTrainedModel:
    """Load the model with transformers, which gives the first answer of a tiny model on a CPU in 4 s.

    vLLM takes 24 s: it measures memory, plans a cache and starts a process, which pays for many requests.

    Args:
        folder: the model's Hugging Face folder.
        name: --model as the user gave it.
        number: number of the actor that answers with the model."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a foreign library on a foreign folder
        raise ConfigError(
            [
                f"--{numbered('model', number)} ({name}): transformers cannot load it: {type(error).__name__}: {error}"
            ]
        ) from error
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, tokenizer.turn_end, *(own if isinstance(own, list) else [own])} - {None}
    # The folder's own defaults, such as top_k, would draw otherwise than training does.
    model.generation_config = GenerationConfig(
        do_sample=arguments.temperature > 0,
        temperature=arguments.temperature or None,
        top_k=0,
        top_p=1.0,
        max_new_tokens=arguments.max_response_length
        or length_of_run(name, number)
        or min(_MAX_TOKENS, longest(model) // 2),
        eos_token_id=sorted(ends),
        pad_token_id=tokenizer.pad_token_id,
    )
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def length_of_run(model: str, number: int = 1) -> int | None:
    """Return the --max-response-length of the run that trained a model. None if no run did, or if the run
    sampled nothing (supervised fine-tuning)."""
    run = run_of_model(Path(model))
    if run is None or not samples(argument_of(run, "algorithm")):
        return None
    return limit_of_run(model, "max-response-length", number)


def limit_of_run(model: str, flag: str, number: int) -> int | None:
    """Return a limit that the run that trained a model has for an actor; None if there is no such number."""
    run = run_of_model(Path(model))
    value = actor_argument_of(run, flag, number) if run is not None else None
    return int(value) if value is not None and value.isdecimal() else None


def longest(model: PreTrainedModel) -> int:
    """Return how many tokens the model can read, prompt and answer together."""
    return model.config.get_text_config().max_position_embeddings


def answer(
    ids: list[int], tokenizer: Tokenizer, model: PreTrainedModel, max_tokens: int | None = None
) -> Printer:
    """Sample an answer, and write it to stdout while it grows. Returns its text and ids.

    Args:
        max_tokens: default --max-response-length."""
    import torch

    prompt = torch.tensor([ids], device=model.device)
    printer = Printer(tokenizer)
    limit = {} if max_tokens is None else {"max_new_tokens": max_tokens}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=printer, **limit)
    printer.is_cut = printer.ids[-1] not in model.generation_config.eos_token_id
    if printer.is_cut:
        name = "--max-response-length" if max_tokens is None else "token"
        sys.stderr.write(f"[cut at {name} {len(printer.ids)}]\n")
    return printer


class Printer:
    """Writes the text of tokens as they come; the interface of transformers' streamers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.is_cut = False
        """Whether the answer ended at a limit."""
        self._tokenizer, self._is_prompt = tokenizer, True

    def put(self, ids: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.ids += ids.flatten().tolist()
        text = self._tokenizer.decode(self.ids)
        if not text.endswith(_UNFINISHED):
            self._write(text)

    def end(self) -> None:
        self._write(self._tokenizer.decode(self.ids))
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _write(self, text: str) -> None:
        new, self.text = visible(text[len(self.text) :]), text
        sys.stdout.write(encodable(new))
        sys.stdout.flush()

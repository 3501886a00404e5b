"""Talk to a Hugging Face folder, or to a run's export or newest checkpoint. One line is one message.

    megarl chat --model runs/a                       type a line, read the answer; Ctrl-D ends it
    echo '23-5-1 ?' | megarl chat --model runs/a     from a pipe: the answers only, one after the other
    megarl chat --model runs/a --single-turn         every line begins a conversation of its own

The conversation goes through the model's chat template. The line /new begins another conversation. A model
that was trained on single questions has never seen a second one: ask it with --single-turn."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.algorithms import samples
from megarl.config.errors import ConfigError
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.inspect.arguments import Parser, number, whole
from megarl.files.checkpoints import run_of_model
from megarl.inspect.models import exported
from megarl.inspect.runs import argument_of
from megarl.inspect.terminal import closed_pipe_is_the_end, encodable, visible

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

NEW = "/new"
_MAX_TOKENS = 1024
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes for a character of which only the first bytes are there."""


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is downloaded
    with exported(arguments.model) as folder:
        sys.stderr.write(f"[loading {arguments.model} with transformers]\n")
        sys.stderr.flush()
        try:
            tokenizer = load_tokenizer(str(folder), "--model")
        except ValueError as error:
            raise ConfigError([str(error)]) from error
        if tokenizer.template is None:
            raise ConfigError(
                [
                    f"--model ({arguments.model}): its tokenizer has no chat template. Put a "
                    f"chat_template.jinja into {folder}."
                ]
            )
        model = _load(folder, arguments, tokenizer)
        with closed_pipe_is_the_end():
            _talk(arguments, tokenizer, model)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("chat", __doc__)
    parser.add_argument(
        "--model", required=True, help="a Hugging Face folder, a run, or a checkpoint of a run"
    )
    parser.add_argument(
        "--temperature", type=number(0, 1.0), default=1.0, help="default: 1, as in training; 0 is greedy"
    )
    parser.add_argument(
        "--max-response-length",
        type=whole(1, 256),
        help="tokens of an answer; default: that of the run, or without one (as after fine-tuning) 1024, or "
        "half of what the model can read if that is less",
    )
    parser.add_argument(
        "--seed", type=whole(0, 1), help="draw the same answers again; default: others each time"
    )
    parser.add_argument(
        "--single-turn",
        action="store_true",
        help="every line is a conversation of its own; default: a line continues the conversation",
    )
    return parser.parse(argv)


def _load(folder: Path, arguments: argparse.Namespace, tokenizer: Tokenizer) -> PreTrainedModel:
    """Load the model with transformers, which gives the first answer of a tiny model on a CPU in 4 s.

    vLLM takes 24 s: it measures memory, plans a cache and starts a process, which pays for many requests."""
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
            [f"--model ({arguments.model}): transformers cannot load it: {type(error).__name__}: {error}"]
        ) from error
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    # The folder's own defaults, such as top_k, would draw otherwise than training does.
    model.generation_config = GenerationConfig(
        do_sample=arguments.temperature > 0,
        temperature=arguments.temperature or None,
        top_k=0,
        top_p=1.0,
        max_new_tokens=arguments.max_response_length
        or _length_of_run(arguments.model)
        or min(_MAX_TOKENS, _longest(model) // 2),
        eos_token_id=sorted(ends),
        pad_token_id=tokenizer.pad_token_id,
    )
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _length_of_run(model: str) -> int | None:
    """Return the --max-response-length of the run that a model is of; None if it is of no run, or of one
    whose algorithm samples nothing."""
    run = run_of_model(Path(model))
    if run is None or not samples(argument_of(run, "algorithm")):
        return None
    length = argument_of(run, "max-response-length")
    return int(length) if length is not None and length.isdecimal() else None


def _talk(arguments: argparse.Namespace, tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    """Answer each line of stdin until its end."""
    longest, most = _longest(model), model.generation_config.max_new_tokens
    messages: list[dict[str, str]] = []
    if sys.stdin.isatty():
        sys.stderr.write(f"[{_banner(arguments.single_turn)}; Ctrl-D ends the chat]\n")
    for line in _lines():
        if line == NEW or arguments.single_turn:
            messages = []
        if line == NEW:
            continue
        messages.append({"role": "user", "content": line})
        ids = tokenizer.encode_prompt(messages)
        if len(ids) + most > longest and len(messages) > 1:
            sys.stderr.write(f"[a new conversation: this one does not fit into {longest} tokens any more]\n")
            messages = messages[-1:]
            ids = tokenizer.encode_prompt(messages)
        if len(ids) + most > longest:
            raise ConfigError(
                [
                    f"--max-response-length ({most}): with the {len(ids)} tokens of the "
                    f"message the model would read more than its {longest} positions. Try "
                    f"{max(1, longest - len(ids))}."
                ]
            )
        messages.append({"role": "assistant", "content": _answer(ids, tokenizer, model)})


def _banner(single_turn: bool) -> str:
    """Return what a line that is typed means."""
    if single_turn:
        return "every line is a conversation of its own"
    return f"a line continues the conversation; {NEW} begins another, as --single-turn does for every line"


def _longest(model: PreTrainedModel) -> int:
    """Return how many tokens the model can read, prompt and answer together."""
    return model.config.get_text_config().max_position_embeddings


def _lines() -> Iterator[str]:
    """Yield the lines of stdin that are not empty, with a prompt and line editing on a terminal."""
    sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from (line for text in sys.stdin if (line := text.strip()))
        return
    import readline  # noqa: F401 - gives input() its line editing

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        if line:
            yield line


def _answer(ids: list[int], tokenizer: Tokenizer, model: PreTrainedModel) -> str:
    """Sample an answer, and write it to stdout while it grows."""
    import torch

    prompt = torch.tensor([ids], device=model.device)
    printer = _Printer(tokenizer)
    model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=printer)
    if printer.ids[-1] not in model.generation_config.eos_token_id:
        sys.stderr.write(f"[cut at --max-response-length {len(printer.ids)}]\n")
    return printer.text


class _Printer:
    """Writes the text of tokens as they come; the interface of transformers' streamers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids: list[int] = []
        self.text = ""
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

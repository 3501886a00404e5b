"""Talk to a Hugging Face folder, or to a run's export or newest checkpoint. One line is one message.

    megarl chat --model runs/a                       type a line, read the answer; Ctrl-D ends it
    echo '23-5-1 ?' | megarl chat --model runs/a     from a pipe: the answers only, one after the other
    megarl chat --model runs/a --single-turn         every line begins a conversation of its own
    megarl chat --model runs/a --env my_env.py:Env   the environment talks to the model, about one row
    megarl chat --model A --actor-2-model B --env my_env.py:Env    two policies in one episode

The conversation goes through the model's chat template. The line /new begins another conversation. A model
that was trained on single questions has never seen a second one: ask it with --single-turn."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.args_file import numbered
from megarl.config.errors import ConfigError
from megarl.config.hub import local_model
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.inspect.arguments import Parser, number, whole
from megarl.inspect.chat_model import answer, load_model, longest
from megarl.inspect.episode_chat import (
    Player,
    add_flags,
    check_flags,
    models_of_actors,
    row_of,
    show_episode,
)
from megarl.inspect.models import exported
from megarl.inspect.terminal import closed_pipe_is_the_end

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEW = "/new"


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    models = {1: arguments.model}
    if arguments.env is not None:
        models, (where, row) = models_of_actors(arguments), row_of(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is downloaded
    with contextlib.ExitStack() as stack:
        folders = {name: stack.enter_context(exported(name)) for name in dict.fromkeys(models.values())}
        players = {n: _player(n, name, folders[name], arguments) for n, name in models.items()}
        stack.enter_context(closed_pipe_is_the_end())
        if arguments.env is not None:
            return show_episode(arguments, where, row, players)
        _talk(arguments, players[1].tokenizer, players[1].model)
    return 0


def _player(number: int, name: str, folder: Path, arguments: argparse.Namespace) -> Player:
    """Load an actor's model and tokenizer. Raises: ConfigError."""
    flag = f"--{numbered('model', number)}"
    sys.stderr.write(f"[loading {name} with transformers]\n")
    sys.stderr.flush()
    try:
        tokenizer = load_tokenizer(str(folder), flag)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if tokenizer.template is None:
        raise ConfigError(
            [f"{flag} ({name}): its tokenizer has no chat template. Put a chat_template.jinja into {folder}."]
        )
    return Player(name, tokenizer, load_model(folder, arguments, tokenizer, name, number))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("chat", __doc__)
    parser.add_argument(
        "--model",
        type=local_model,
        required=True,
        help="a Hugging Face folder, a run, or a checkpoint of a run",
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
    add_flags(parser, argv)
    arguments = parser.parse(argv)
    check_flags(arguments)
    return arguments


def _talk(arguments: argparse.Namespace, tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    """Answer each line of stdin until its end."""
    most_read, most = longest(model), model.generation_config.max_new_tokens
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
        if len(ids) + most > most_read and len(messages) > 1:
            sys.stderr.write(
                f"[a new conversation: this one does not fit into {most_read} tokens any more]\n"
            )
            messages = messages[-1:]
            ids = tokenizer.encode_prompt(messages)
        if len(ids) + most > most_read:
            raise ConfigError(
                [
                    f"--max-response-length ({most}): with the {len(ids)} tokens of the "
                    f"message the model would read more than its {most_read} positions. Try "
                    f"{max(1, most_read - len(ids))}."
                ]
            )
        messages.append({"role": "assistant", "content": answer(ids, tokenizer, model).text})


def _banner(single_turn: bool) -> str:
    """Return the hint that tells the user what a typed line does."""
    if single_turn:
        return "every line is a conversation of its own"
    return f"a line continues the conversation; {NEW} begins another, as --single-turn does for every line"


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

"""Play an episode of a model with an environment, on one row of the data, and show the conversation: `megarl
chat --env`.

    user       439-38 ?
    assistant  439-38
    tool       401
    assistant  #### 401
    reward     1
    done       stop, reward 1, 2 answers

The limits are those of training, and the answers are sampled with transformers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.environments import environments, names, of_source
from megarl.config.errors import ConfigError, raise_errors
from megarl.config.rules_episodes import environment_errors
from megarl.config.schema import EpisodeConfig, SamplingConfig
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.chat import Chat
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.runner import Answer, Turn, play
from megarl.files.checkpoints import run_of_model
from megarl.inspect.arguments import whole
from megarl.inspect.chat_model import answer, longest
from megarl.inspect.runs import argument_of
from megarl.inspect.terminal import encodable, visible

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME_WIDTH = 10
_DEFAULTS = {"env_python": None, "row": 0, "data": None, "max_turns": None, "max_context_length": None}
"""Flags that need --env, and their defaults."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a conversation with an environment."""
    group = parser.add_argument_group("with an environment")
    group.add_argument(
        "--env",
        nargs="+",
        help="path/to/file.py:Class, or several by name, as in training: show the conversation on one row",
    )
    group.add_argument(
        "--env-python", nargs="+", help="Python of the environment, as in training; default: megarl's"
    )
    group.add_argument("--row", type=whole(0, 1), default=0, help="row of the data, from 0; default: 0")
    group.add_argument(
        "--data", help="file with the row; default: the run's --eval-data, or its --train-data"
    )
    group.add_argument(
        "--max-turns", type=whole(1, 5), help="answers of the model; default: the run's, or 10"
    )
    group.add_argument(
        "--max-context-length",
        type=whole(1, 1024),
        help="tokens of the conversation; default: the run's, or all that the model can read",
    )


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags that do not go together."""
    if arguments.env is not None:
        if arguments.single_turn:
            raise ConfigError(["--single-turn: the environment leads the conversation. Leave it out."])
        raise_errors([*environment_errors(_episodes(arguments))])
        return
    for name, default in _DEFAULTS.items():
        if getattr(arguments, name) != default:
            raise ConfigError([f"--{name.replace('_', '-')}: has no effect without --env. Leave it out."])


def _episodes(arguments: argparse.Namespace) -> EpisodeConfig:
    python = arguments.env_python
    return EpisodeConfig(env=(*arguments.env,), env_python=None if python is None else (*python,))


def begin_episode(arguments: argparse.Namespace) -> Episode:
    """Return a new episode on the row that the flags name. Raises: ConfigError if there is no such row."""
    flag, files = "--data", arguments.data
    if files is None:
        flag, files = _data_of_run(arguments.model)
    try:
        rows = PromptDataset.load(files, flag=flag, first=arguments.row + 1)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if arguments.row >= len(rows):
        raise ConfigError(
            [f"--row ({arguments.row}): {files} has {len(rows)} rows, counted from 0. Try {len(rows) - 1}."]
        )
    specs, source = environments(_episodes(arguments)), rows[arguments.row].data_source
    if of_source(specs, source) is None:
        raise ConfigError(
            [
                f"--row ({arguments.row}): its data_source is {source!r}, and --env has "
                f"{', '.join(map(str, names(specs)))}. Try another row, or name its environment."
            ]
        )
    return Episode(rows[arguments.row].columns)


def _data_of_run(model: str) -> tuple[str, str]:
    """Return the flag and the file of the rows of the run that a model is of."""
    run = run_of_model(Path(model))
    for flag in ("eval-data", "train-data"):
        if run is not None and (name := argument_of(run, flag)) is not None:
            return f"--{flag} of {run}", name
    raise ConfigError(
        [
            f"--data: --model ({model}) is of no run with one data file, so name a file, e.g. --data test.jsonl."
        ]
    )


def show_episode(
    arguments: argparse.Namespace, episode: Episode, tokenizer: Tokenizer, model: PreTrainedModel
) -> int:
    """Play the episode, and write its messages and rewards to stdout as they come.

    Returns: 1 if the environment has failed, else 0. Raises: ConfigError if it cannot be loaded."""
    ends = model.generation_config.eos_token_id
    speaker = _Speaker(episode, tokenizer, model)
    config = _episodes(arguments)
    with EnvironmentPool(environments(config), config.env_timeout_s, 1) as pool:
        try:
            play([episode], speaker, pool, Chat(tokenizer, ends), _limits(arguments, model))
        except ValueError as error:
            raise ConfigError([str(error)]) from error
    speaker.show_new()
    result = episode.result
    if result.failure is not None:
        sys.stderr.write(f"[the environment has failed ({result.cause}): {visible(result.failure)}]\n")
        return 1
    answers = f"{result.num_turns} answer{'s' if result.num_turns != 1 else ''}"
    _write("done", f"{result.finish_reason}, reward {result.reward:g}, {answers}")
    return 0


def _limits(arguments: argparse.Namespace, model: PreTrainedModel) -> Limits:
    """Return the limits of an episode: those of the flags, or else those of the run that trained the
    model."""
    run = run_of_model(Path(arguments.model))

    def of_run(flag: str) -> int | None:
        value = argument_of(run, flag) if run is not None else None
        return int(value) if value is not None and value.isdecimal() else None

    most = longest(model)
    context = arguments.max_context_length or of_run("max-context-length") or most
    return Limits(
        arguments.max_turns or of_run("max-turns") or SamplingConfig().max_turns,
        model.generation_config.max_new_tokens,
        min(context, most),
    )


class _Speaker:
    """The model as the engine of one episode: each step samples one answer and shows it.

    It also shows what has happened since the last answer."""

    def __init__(self, episode: Episode, tokenizer: Tokenizer, model: PreTrainedModel) -> None:
        self._episode, self._tokenizer, self._model = episode, tokenizer, model
        self._turns: list[Turn] = []
        self._answers: list[Answer] = []
        self._num_messages = self._num_rewards = 0  # that are shown

    def show_new(self) -> None:
        """Write the rewards and messages that have come since the last answer."""
        for reward in self._episode.turn_rewards[self._num_rewards :]:
            if reward is not None:
                _write("reward", f"{reward:g}")
        self._num_rewards = len(self._episode.turn_rewards)
        session = self._episode.session
        messages = session.turns[-1].conversation if session is not None else []
        for message in messages[self._num_messages :]:
            if message["role"] != "assistant":  # answers are shown while they are sampled
                _write(message["role"], str(message.get("content", "")))
        self._num_messages = len(messages)

    def add(self, turns: Sequence[Turn]) -> None:
        self._turns += turns

    def has_unfinished(self) -> bool:
        return bool(self._turns)

    def step(self) -> None:
        turn = self._turns.pop()
        self.show_new()
        sys.stdout.write("assistant".ljust(_NAME_WIDTH) + " ")
        made = answer(turn.prompt, self._tokenizer, self._model, turn.max_tokens)
        nothing = [0] * len(made.ids)
        self._answers.append(Answer(turn.index, made.ids, nothing, nothing, made.is_cut, turn.number))

    def take(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers


def _write(name: str, text: str) -> None:
    indent = " " * (_NAME_WIDTH + 1)
    shown = encodable(visible(text)).replace("\n", f"\n{indent}")
    sys.stdout.write(f"{visible(name).ljust(_NAME_WIDTH)} {shown}\n")
    sys.stdout.flush()

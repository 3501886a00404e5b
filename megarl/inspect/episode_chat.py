"""Play an episode of one or several models with an environment, on one row of the data, and show the
conversation: `megarl chat --env`.

    row        7 of test.jsonl
    user       439-38 ?
    assistant  439-38
    tool       401
    assistant  #### 401
    reward     1
    done       stop, reward 1, 2 answers

Where several policies play, each line names who speaks, and to whom:

    user > actor    47 ?
    actor           47
    user > actor_2  47 ?
    actor_2         47

The limits are those of training, and the answers are sampled with transformers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.args_file import number_and_base, numbered
from megarl.config.environments import environments, names, of_source
from megarl.config.errors import ConfigError, raise_errors
from megarl.config.hub import local_model, local_path
from megarl.config.rules_episodes import environment_errors
from megarl.config.schema import EpisodeConfig, SamplingConfig
from megarl.data.prompts import Prompt, PromptDataset
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.chat import Chat
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.environments import Environments, Reply
from megarl.episodes.episode import FIRST_ACTOR, Episode, Limits
from megarl.episodes.runner import Answer, Turn, failure_of, play_to_end, reward_of
from megarl.episodes.shared import ActorEngines, Seat, SharedPlay
from megarl.files.checkpoints import run_of_model
from megarl.inspect.arguments import whole
from megarl.inspect.chat_model import answer, limit_of_run, longest
from megarl.inspect.models import ambiguous_model, model_errors, models_of_others, shares_episodes
from megarl.inspect.runs import argument_of, data_files_of
from megarl.inspect.terminal import encodable, visible
from megarl.role_names import suffix_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEFAULTS = {
    "env_python": None,
    "row": 0,
    "data": None,
    "prompt_key": None,
    "max_turns": None,
    "max_context_length": None,
}
"""Flags that need --env, and their defaults."""
_PROMPT_KEY = "prompt"


@dataclass(frozen=True, slots=True)
class Player:
    """The model that answers as one actor."""

    name: str
    """--model as the user gave it."""
    tokenizer: Tokenizer
    model: PreTrainedModel


def add_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the flags of a conversation with an environment.

    Args:
        argv: the command line, which says of how many actors there are models."""
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
        "--data",
        type=local_path,
        help="file with the row; default: the run's --eval-data, or its --train-data",
    )
    group.add_argument(
        "--prompt-key", help=f"column of the conversation; default: the run's, or {_PROMPT_KEY}"
    )
    group.add_argument(
        "--max-turns", type=whole(1, 5), help="answers of the model; default: the run's, or 10"
    )
    group.add_argument(
        "--max-context-length",
        type=whole(1, 1024),
        help="tokens of the conversation; default: the run's, or all that the model can read",
    )
    numbers = {number_and_base(word.removeprefix("--").partition("=")[0])[0] for word in argv}
    for number in sorted({2, *numbers} - {1}):
        group.add_argument(
            f"--{numbered('model', number)}",
            type=local_model,
            help=f"model of the policy that answers where the environment names actor_{number}; default: that of the "
            "run in --model, if its actors have played in the same episodes",
        )


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags that do not go together."""
    if arguments.env is not None:
        if arguments.single_turn:
            raise ConfigError(["--single-turn: the environment leads the conversation. Leave it out."])
        raise_errors([*environment_errors(_episodes(arguments))])
        return
    given = {name: getattr(arguments, name) != default for name, default in _DEFAULTS.items()}
    given |= {numbered("model", number): True for number in _models_given(arguments)}
    for name, is_given in given.items():
        if is_given:
            raise ConfigError([f"--{name.replace('_', '-')}: has no effect without --env. Leave it out."])


def _models_given(arguments: argparse.Namespace) -> dict[int, str]:
    """Return number -> --actor-N-model of the actors that have one."""
    found = {number_and_base(name.replace("_", "-"))[0]: value for name, value in vars(arguments).items()}
    return {number: name for number, name in sorted(found.items()) if number > 1 and name is not None}


def models_of_actors(arguments: argparse.Namespace) -> dict[int, str]:
    """Return number of each actor -> its model, the first one's first. Raises: ConfigError."""
    own = _models_given(arguments)
    raise_errors([error for number, name in own.items() for error in ambiguous_model(number, name)])
    is_shared = shares_episodes(run_of_model(Path(arguments.model)))
    models = {1: arguments.model} | (models_of_others(arguments.model) if is_shared else {}) | own
    missing, last = next(number for number in range(1, len(models) + 2) if number not in models), max(models)
    if missing < last:
        flag = f"--{numbered('model', last)} ({models[last]})"
        raise ConfigError([f"{flag}: there is no actor {missing}. Give --{numbered('model', missing)} too."])
    raise_errors(
        [e for number, name in models.items() for e in model_errors(name, numbered("model", number))]
    )
    return dict(sorted(models.items()))


def _episodes(arguments: argparse.Namespace) -> EpisodeConfig:
    python = arguments.env_python
    return EpisodeConfig(env=(*arguments.env,), env_python=None if python is None else (*python,))


def row_of(arguments: argparse.Namespace) -> tuple[str, Prompt]:
    """Return the row that the flags name, and where it stands. Raises: ConfigError if there is no such row."""
    run, prompt_key = run_of_model(Path(arguments.model)), arguments.prompt_key
    if prompt_key is None:
        prompt_key = (run and argument_of(run, "prompt-key")) or _PROMPT_KEY
    flag, files = "--data", [arguments.data]
    if arguments.data is None:
        flag, files = _data_of_run(arguments.model, run)
    named = " ".join(files)
    try:
        rows = PromptDataset.load(files, prompt_key, flag=flag, first=arguments.row + 1)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if arguments.row >= len(rows):
        rule = f"{named} {'has' if len(files) == 1 else 'have'} {len(rows)} rows, counted from 0"
        raise ConfigError([f"--row ({arguments.row}): {rule}. Try {len(rows) - 1}."])
    specs, source = environments(_episodes(arguments)), rows[arguments.row].data_source
    if of_source(specs, source) is None:
        raise ConfigError(
            [
                f"--row ({arguments.row}): its data_source is {source!r}, and --env has "
                f"{', '.join(map(str, names(specs)))}. Try another row, or name its environment."
            ]
        )
    return f"{arguments.row} of {named}", rows[arguments.row]


def _data_of_run(model: str, run: Path | None) -> tuple[str, list[str]]:
    """Return the data files of the run that a model comes from, and the flag that named them there.
    Raises: ConfigError if there are none."""
    for flag in ("eval-data", "train-data"):
        if run is not None and (files := data_files_of(run, flag)):
            return f"--{flag} of {run}", files
    raise ConfigError(
        [f"--data: --model ({model}) is of no run with data files, so name a file, e.g. --data test.jsonl."]
    )


def show_episode(
    arguments: argparse.Namespace, where: str, row: Prompt, players: Mapping[int, Player]
) -> int:
    """Play an episode, and write its messages and rewards to stdout as they come.

    Args:
        where: number and file of the row.
        players: number of each actor -> its model, the first one's first.
    Returns: 1 if the environment has failed, else 0. Raises: ConfigError if it cannot be loaded."""
    named = {f"actor{suffix_of(number - 1)}": (number, player) for number, player in players.items()}
    screen = _Screen([*named])
    seats = {
        actor: Seat(
            Chat(player.tokenizer, player.model.generation_config.eos_token_id),
            _limits(arguments, player, number),
        )
        for actor, (number, player) in named.items()
    }
    engines = ActorEngines({actor: _Speaker(actor, player, screen) for actor, (_, player) in named.items()})
    others = {actor: Episode(row.columns) for actor in seats if actor != FIRST_ACTOR}
    episode, config = Episode(row.columns, others=others), _episodes(arguments)
    with EnvironmentPool(environments(config), config.env_timeout_s, 1) as pool:
        screen.show("row", where)
        try:
            play_to_end(_ShownPlay(pool, seats, screen), [episode], engines, pool)
        except ValueError as error:
            raise ConfigError([str(error)]) from error
    if episode.failure is not None:
        sys.stderr.write(f"[the environment has failed ({episode.cause}): {visible(episode.failure)}]\n")
        return 1
    screen.show_end(episode)
    return 0


def _limits(arguments: argparse.Namespace, player: Player, number: int) -> Limits:
    """Return an actor's limits in an episode: those of the flags, or else those of the run that trained its
    model."""
    most = longest(player.model)
    context = arguments.max_context_length or limit_of_run(player.name, "max-context-length", number) or most
    turns = arguments.max_turns or limit_of_run(player.name, "max-turns", number)
    return Limits(
        turns or SamplingConfig().max_turns,
        player.model.generation_config.max_new_tokens,
        min(context, most),
    )


class _Screen:
    """Writes who says what, with the names of all speakers in one column.

    Args:
        actors: names of the actors of the episode."""

    def __init__(self, actors: Sequence[str]) -> None:
        self._actors, self._is_shared = actors, len(actors) > 1
        self._width = max(map(len, actors)) + len("user > ") if self._is_shared else 10

    def begin_answer(self, actor: str) -> None:
        """Write the name of the actor whose answer is written next."""
        sys.stdout.write((actor if self._is_shared else "assistant").ljust(self._width) + " ")

    def show_reply(self, reply: Reply, is_last: bool) -> None:
        """Write the rewards of a reply, and its messages for the actor that answers next.

        Args:
            is_last: whether no actor answers, as the episode has ended."""
        rewards = {actor: reward_of(reply, actor) for actor in self._actors}
        given = {actor: f"{reward:g}" for actor, reward in rewards.items() if reward is not None}
        if given:
            is_same = reply.rewards is None
            self.show("reward", given[FIRST_ACTOR] if is_same else _each(given))
        listener = f" > {reply.actor or FIRST_ACTOR}" if self._is_shared else ""
        for message in () if is_last else reply.messages:
            self.show(f"{message['role']}{listener}", str(message.get("content", "")))

    def show_end(self, episode: Episode) -> None:
        """Write how the episode has ended, and what each actor has earned in how many answers."""
        results = {actor: record.result for actor, record in episode.seats.items()}
        said = {actor: _result(one.reward, one.num_turns) for actor, one in results.items()}
        self.show("done", f"{episode.finish}, {_each(said) if self._is_shared else said[FIRST_ACTOR]}")

    def show(self, name: str, text: str) -> None:
        """Write a line of the conversation: who or what it is of, and the text."""
        indent = " " * (self._width + 1)
        shown = encodable(visible(text)).replace("\n", f"\n{indent}")
        sys.stdout.write(f"{visible(name).ljust(self._width)} {shown}\n")
        sys.stdout.flush()


def _each(texts: Mapping[str, str]) -> str:
    return "; ".join(f"{actor}: {text}" for actor, text in texts.items())


def _result(reward: float | None, num_answers: int) -> str:
    answers = f"{num_answers} answer{'s' if num_answers != 1 else ''}"
    return f"reward {reward:g}, {answers}" if reward is not None else "never asked"


class _ShownPlay(SharedPlay):
    """An episode that is shown as it is played."""

    def __init__(self, environments: Environments, seats: Mapping[str, Seat], screen: _Screen) -> None:
        super().__init__(environments, seats)
        self._screen = screen

    def _after(self, reply: Reply) -> Iterable[Turn]:
        failure = failure_of(reply, self._seats)
        if failure is not None and reply.failure is None:
            last = numbered("model", len(self._seats) + 1)
            raise ConfigError([f"--env: {failure[1]}; here each has a model: --{last} M."])
        turns = super()._after(reply)
        if failure is None:
            self._screen.show_reply(reply, is_last=not turns)
        return turns


class _Speaker:
    """An actor's model as the engine of one episode: each step samples one answer and shows it."""

    def __init__(self, actor: str, player: Player, screen: _Screen) -> None:
        self._actor, self._player, self._screen = actor, player, screen
        self._turns: list[Turn] = []
        self._answers: list[Answer] = []

    def add(self, turns: Sequence[Turn]) -> None:
        self._turns += turns

    def has_unfinished(self) -> bool:
        return bool(self._turns)

    def step(self) -> None:
        turn = self._turns.pop()
        self._screen.begin_answer(self._actor)
        made = answer(turn.prompt, self._player.tokenizer, self._player.model, turn.max_tokens)
        nothing = [0] * len(made.ids)
        self._answers.append(Answer(turn.index, made.ids, nothing, nothing, made.is_cut, turn.number))

    def take(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

"""Sample episodes in which the engines of one rank, one of each actor, take turns (--share-episodes).

Each actor's rollout role asks for its own samples of the same prompts. The first of these calls plays the
episodes; the others take their actor's part of them. So a step's flow is that of actors that have nothing to do
with each other, and the calls may come in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.data.prompts import PromptDataset
from megarl.episodes.episode import FIRST_ACTOR, Episode
from megarl.episodes.runner import play_to_end
from megarl.episodes.shared import ActorEngines, Seat, SharedPlay
from megarl.workers.episodes import EpisodeSampler
from megarl.workers.answer import Answer
from megarl.workers.store import RolloutSample

Visits = Sequence[tuple[int, int]]
"""(visit, row) of each prompt."""


@dataclass(frozen=True)
class _Player:
    """An actor in the episodes."""

    name: str
    sampler: EpisodeSampler
    first_turns: Callable[[str, Visits, bool], tuple[list[Answer], dict[str, float]]]
    """Returns the actor's samples that prompts need, none of them begun, and how they are sampled."""
    datasets: Mapping[str, PromptDataset]


@dataclass(frozen=True)
class _Asked:
    """What the calls of the actors must agree in."""

    purpose: str
    visits: tuple[tuple[int, int], ...]
    greedy: bool


class SharedEpisodes:
    """The episodes that the engines of one rank play together. The first actor's environments are used."""

    def __init__(self) -> None:
        self._players: dict[str, _Player] = {}  # by suffix
        self._untaken: dict[str, tuple[_Asked, list[RolloutSample]]] = {}  # by suffix

    def join(
        self,
        suffix: str,
        sampler: EpisodeSampler,
        first_turns: Callable[[str, Visits, bool], tuple[list[Answer], dict[str, float]]],
        datasets: Mapping[str, PromptDataset],
    ) -> None:
        """Add an actor, the first one first."""
        self._players[suffix] = _Player(f"actor{suffix}", sampler, first_turns, datasets)

    def samples_of(self, suffix: str, purpose: str, visits: Visits, greedy: bool) -> list[RolloutSample]:
        """Return an actor's samples of the episodes of these prompts. They are played unless another actor's
        call has played them.

        Raises: ValueError if that call was for other prompts."""
        asked = _Asked(purpose, tuple(visits), greedy)
        if suffix not in self._untaken:
            played = self._play(asked)
            self._untaken = {of_actor: (asked, samples) for of_actor, samples in played.items()}
        played_for, samples = self._untaken.pop(suffix)
        if played_for != asked:
            raise ValueError(
                f"generate: rollout{suffix} is asked for {_said(asked)}, and the episodes that it shares with other "
                f"actors were played for {_said(played_for)}. Ask the rollout role of every actor for the same "
                "prompts, each once."
            )
        return samples

    def _play(self, asked: _Asked) -> dict[str, list[RolloutSample]]:
        """Return suffix of each actor -> its samples of new episodes."""
        first = self._players[""]
        seats, engines, answers = {}, {}, {}
        for player in self._players.values():
            answers[player.name], how = player.first_turns(asked.purpose, asked.visits, asked.greedy)
            engines[player.name] = player.sampler.turns(answers[player.name], how)
            seats[player.name] = Seat(player.sampler.chat, player.sampler.limits(asked.purpose))
        dataset, others = first.datasets[asked.purpose], [name for name in seats if name != FIRST_ACTOR]
        rows = [dataset[answer.row].columns for answer in answers[FIRST_ACTOR]]
        episodes = [Episode(row, others={name: Episode(row) for name in others}) for row in rows]
        environments = first.sampler.environments
        playing = SharedPlay(environments, seats)
        play_to_end(playing, episodes, ActorEngines(engines), environments)
        return {
            suffix: player.sampler.samples(
                answers[player.name], [one.seats[player.name] for one in episodes], engines[player.name]
            )
            for suffix, player in self._players.items()
        }


def _said(asked: _Asked) -> str:
    rows = [row for _, row in asked.visits]
    shown = f"{rows[:8]}{'...' if len(rows) > 8 else ''}"
    return f"{'greedy ' if asked.greedy else ''}samples of the rows {shown} of the {asked.purpose} data"

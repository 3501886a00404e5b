"""Keep the calls of each environment, so that a lost environment can be brought back by repeating its calls.

    environments = RepeatableEnvironments(pool)
    environments.is_live = False             nothing is asked: what follows was said before
    number = environments.open(row)
    environments.note(reply)                 its first messages, of a checkpoint or a log
    environments.step(number, text, sampled)
    environments.go_live()                   a new environment gets the same calls again
    environments.replies(0.1)                only replies that were not given before
    environments.take_lost()                 {number: why}: it replied otherwise this time

An agent calls instead of being called, so nobody can repeat what it did: it is lost as soon as it has
begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.episodes.environments import Environments, Reply, Sampled

_AGENT = "an agent cannot be brought back to where it was"


@dataclass(eq=False, slots=True)
class _Calls:
    """The calls of one episode so far. Reply i comes before text i."""

    row: Mapping[str, Any]
    replies: list[Reply] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    in_pool: int | None = None
    """Number of the episode in the pool; None if the pool does not play it."""
    num_repeated: int = 0
    """Number of `replies` that the environment in the pool has given."""


class RepeatableEnvironments:
    """The environments of a pool, under numbers of their own.

    Args:
        of_agents: whether the pool runs agents."""

    def __init__(self, pool: Environments, of_agents: bool) -> None:
        self._pool, self._of_agents = pool, of_agents
        self.is_live = True
        """Whether the pool plays the episodes. If not, `note` says what the environments reply."""
        self._num_episodes = 0
        self._calls: dict[int, _Calls] = {}
        self._number_of: dict[int, int] = {}  # number in the pool -> own number
        self._lost: dict[int, str] = {}

    def open(self, row: Mapping[str, Any]) -> int:
        number = self._num_episodes
        self._num_episodes += 1
        self._calls[number] = _Calls(row)
        if self.is_live:
            self._start(number)
        return number

    def step(self, episode: int, text: str, sampled: Sampled) -> None:
        calls = self._calls[episode]
        calls.texts.append(text)
        if calls.in_pool is not None and (self._of_agents or calls.num_repeated == len(calls.texts)):
            self._pool.step(calls.in_pool, text, sampled)

    def refuse(self, reply: Reply, code: str, message: str, is_final: bool = False) -> bool:
        in_pool = self._calls[reply.episode].in_pool
        if in_pool is None:
            return self._of_agents
        return self._pool.refuse(replace(reply, episode=in_pool), code, message, is_final)

    def end(self, episode: int) -> None:
        self._stop(self._calls.pop(episode))
        self._lost.pop(episode, None)

    def replies(self, timeout_s: float) -> list[Reply]:
        found = []
        for reply in self._pool.replies(timeout_s):
            number = self._number_of[reply.episode]
            reply = replace(reply, episode=number)
            calls = self._calls[number]
            if calls.num_repeated == len(calls.replies):
                self.note(reply)
                calls.num_repeated += 1
                found.append(reply)
            elif number not in self._lost:
                self._compare(number, calls, reply)
        return found

    def extend(self, seconds: float) -> None:
        self._pool.extend(seconds)

    def close(self) -> None:
        self._pool.close()

    def note(self, reply: Reply) -> None:
        """Note what the environment of an episode has replied."""
        self._calls[reply.episode].replies.append(reply)

    def go_live(self) -> None:
        """Let the pool play all episodes from now on, after it has repeated their calls."""
        self.is_live = True
        for number, calls in self._calls.items():
            if calls.in_pool is None:
                self._start(number)

    def restart(self, episode: int) -> None:
        """Begin an episode anew. A reply with its first messages follows."""
        calls = self._calls[episode]
        self._stop(calls)
        self._lost.pop(episode, None)
        self._calls[episode] = _Calls(calls.row)
        if self.is_live:
            self._start(episode)

    def take_lost(self) -> dict[int, str]:
        """Return the episodes that cannot be brought back, and why. Each must be ended or begun anew."""
        lost, self._lost = self._lost, {}
        return lost

    def _start(self, number: int) -> None:
        calls = self._calls[number]
        if self._of_agents and calls.replies:
            self._lost[number] = _AGENT
            return
        calls.in_pool = self._pool.open(calls.row)
        self._number_of[calls.in_pool] = number

    def _stop(self, calls: _Calls) -> None:
        if calls.in_pool is not None:
            del self._number_of[calls.in_pool]
            self._pool.end(calls.in_pool)

    def _compare(self, number: int, calls: _Calls, reply: Reply) -> None:
        """Compare a reply with the one that was given before, and make the next call."""
        before = calls.replies[calls.num_repeated]
        if reply != before:
            call = "reset" if not calls.num_repeated else f"step {calls.num_repeated}"
            self._lost[number] = (
                f"its environment replied {_text(reply)} to {call}, and before {_text(before)}"
            )
            return
        calls.num_repeated += 1
        if len(calls.texts) >= calls.num_repeated:
            assert calls.in_pool is not None
            self._pool.step(calls.in_pool, calls.texts[calls.num_repeated - 1], Sampled([], [], False))


def _text(reply: Reply) -> str:
    if reply.failure is not None:
        return f"a failure ({reply.failure:.300})"
    return f"{(reply.messages, reply.reward, reply.done)!r:.300}"
